"""Prompts: a built-in set of word problems, prompt files, chat templates, and the check of an answer.

The problems were written for this project. Each carries its arithmetic, so that a reader can check it and a run can say
how many completions end in the right number.
"""

import importlib.util
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import TemplateError
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

REASONING_START, REASONING_END = "<start_working_out>", "<end_working_out>"
SOLUTION_START, SOLUTION_END = "<SOLUTION>", "</SOLUTION>"

GRPO_SYSTEM_PROMPT = (
    "You will be given a problem to solve. "
    f"First work it out step by step between {REASONING_START} and {REASONING_END}. "
    f"Then write the final answer, and nothing else, between {SOLUTION_START} and {SOLUTION_END}."
)

NUMBER = r"-?\d[\d,]*(?:\.\d+)?"

# The format that Unsloth's public Qwen3 GRPO notebook trains base models on: turns end with the end-of-sequence token, and
# the answer begins inside the reasoning. A template in the tokenizers' own language, so that a trainer can be given it too.
GRPO_CHAT_TEMPLATE = (
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + eos_token }}{% set turns = messages[1:] %}"
    "{% else %}{{ '" + GRPO_SYSTEM_PROMPT + "' + eos_token }}{% set turns = messages %}{% endif %}"
    "{% for message in turns %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '" + REASONING_START + "' }}{% endif %}"
)


@dataclass(frozen=True)
class RawPrompt:
    """A prompt as it was given, and where: text or chat messages, or anything else that a file's line may hold."""

    source: str
    content: object
    answer: int | str | None = None
    error: str | None = None


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model reads it, or the `error` why it can't be run."""

    source: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    answer: int | str | None = None
    error: str | None = None


def choose_template(choice: str, config: PreTrainedConfig, model_name: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Resolves --chat_template to `grpo`, `native` or `plain` (no template).

    `auto` is `grpo` for Qwen3 base models, recognized by name or by <|endoftext|> (151643) ending their sequences, else the
    tokenizer's own template, else none. Raises ValueError when `native` is asked of a tokenizer that has no template.
    """
    if choice == "auto":
        is_base = "base" in Path(model_name).name.lower() or config.eos_token_id == 151643
        if config.model_type.startswith("qwen3") and is_base:
            return "grpo"
        return "native" if tokenizer.chat_template else "plain"
    if choice == "native" and not tokenizer.chat_template:
        raise ValueError(f"--chat_template native: the tokenizer of {model_name} has no chat template; use grpo or auto")
    return choice


def render(raw: RawPrompt, template: str, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """Templates and tokenizes text or chat messages. Never raises: what can't be a prompt carries its error."""
    content = raw.content
    if isinstance(content, str):
        content = [{"role": "user", "content": content}]
    if raw.error:
        return Prompt(raw.source, error=raw.error)
    if not _is_conversation(content):
        kind = type(content).__name__
        return Prompt(raw.source, error=f"must be text or a list of messages with role and content, not {kind} {content!r:.40}")
    if not any(message["content"].strip() for message in content):
        return Prompt(raw.source, error="empty")
    if template == "plain":
        text = "\n".join(message["content"] for message in content)
        return Prompt(raw.source, text, tokenizer.encode(text), raw.answer)
    try:
        text = tokenizer.apply_chat_template(
            content,
            chat_template=GRPO_CHAT_TEMPLATE if template == "grpo" else None,
            add_generation_prompt=True,
            tokenize=False,
        )
    except TemplateError as error:  # some templates refuse some conversations, such as one with a system message
        return Prompt(raw.source, error=f"the chat template refuses it: {error}")
    # The template has written the special tokens already, a BOS included.
    return Prompt(raw.source, text, tokenizer.encode(text, add_special_tokens=False), raw.answer)


def _is_conversation(content: object) -> bool:
    return isinstance(content, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in content
    )


def read_prompts_file(path: str) -> list[RawPrompt]:
    """One prompt for each line that isn't blank. Raises OSError or UnicodeDecodeError.

    A line is JSON (a string, {"prompt": ...} or {"messages": [...]}, either with an optional "answer") or plain text. One that
    holds neither becomes a prompt with an error, so that the others can run.
    """
    with open(path, encoding="utf-8") as lines:
        return [_parse_line(f"{path}:{number}", line.strip()) for number, line in enumerate(lines, 1) if line.strip()]


def _parse_line(source: str, line: str) -> RawPrompt:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        return RawPrompt(source, line, error=f"invalid JSON: {error}" if line.startswith("{") else None)
    if not isinstance(value, dict):
        return RawPrompt(source, value)
    for key in ("prompt", "messages"):
        if key in value:
            answer = known_answer(value.get("answer"))
            if isinstance(answer, str) and importlib.util.find_spec("math_verify") is None:
                needed = f"its answer {answer!r} is no integer, which needs math-verify: pip install math-verify==0.9.0"
                return RawPrompt(source, value[key], error=needed)
            return RawPrompt(source, value[key], answer)
    return RawPrompt(source, value, error='has neither "prompt" nor "messages"')


def known_answer(value: object) -> int | str | None:
    """An integer where the text is one, with a unit or not (1,234, $12.00, 5 apples), else the text: a fraction, a root, a term."""
    text = "" if value is None else str(value).strip()
    number = parse_number(text) if re.fullmatch(rf"[$€]?\s*{NUMBER}(\s+[A-Za-z ]+|[%$€.]?)", text) else None
    return number if number is not None else text or None


def solution_of(completion: str) -> str | None:
    """What stands inside <SOLUTION>, else inside \\boxed{}; None where there is neither."""
    solution = re.search(re.escape(SOLUTION_START) + r"(.*?)(?:" + re.escape(SOLUTION_END) + "|$)", completion, re.DOTALL)
    if solution is None and "\\boxed{" in completion:
        return balanced(completion.split("\\boxed{", 1)[1])
    return solution and solution[1]


def balanced(text: str) -> str:
    """Up to the brace that closes what was opened before the text."""
    depth = 1
    for end, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:end]
    return text


def parse_answer(completion: str) -> int | None:
    """The integer that a completion's solution ends in, or the completion where it marks none."""
    solution = solution_of(completion)
    return parse_number(completion if solution is None else solution)


def is_right(completion: str, answer: int | str) -> bool:
    """Whether the completion's answer is the known one: as an integer, or else as mathematics, which math-verify compares."""
    if isinstance(answer, int):
        return parse_answer(completion) == answer
    from math_verify import parse, verify

    solution = solution_of(completion)
    return verify(parse(f"${answer}$"), parse(completion if solution is None else f"${solution.strip().strip('$')}$"))


def parse_number(text: str) -> int | None:
    """The last integer of a text; 1,234 and 12.00 count, 12.5 does not."""
    numbers = re.findall(NUMBER, text)
    if not numbers:
        return None
    value = float(numbers[-1].replace(",", ""))
    return int(value) if value.is_integer() else None


# (problem, answer)
WORD_PROBLEMS: list[tuple[str, int]] = [
    ("A bakery fills 18 trays with 24 rolls each. By noon 275 rolls are sold. How many rolls are left?", 18 * 24 - 275),
    ("Mira reads 35 pages on each weekday and 60 pages on each day of the weekend. How many pages does she read in 3 weeks?", 3 * (5 * 35 + 2 * 60)),
    ("A bus leaves the depot with 14 passengers. At the first stop 9 get on and 3 get off, at the second 6 get on and 11 get off. How many passengers are on the bus now?", 14 + 9 - 3 + 6 - 11),
    ("Theo buys 4 notebooks at $3 each and 5 pens at $2 each. He pays with a $50 note. How many dollars does he get back?", 50 - 4 * 3 - 5 * 2),
    ("A water tank holds 900 liters and is one third full. A pump adds 25 liters every minute. After how many minutes is the tank full?", (900 - 900 // 3) // 25),
    ("A school orders 7 boxes of chalk. Each box has 12 packs, and each pack has 10 sticks. The teachers use 15 sticks a day. For how many days does the chalk last?", 7 * 12 * 10 // 15),
    ("Three friends share the cost of a $96 tent and a $54 stove equally. How many dollars does each of them pay?", (96 + 54) // 3),
    ("A farmer has 23 hens. Each hen lays 5 eggs a week. Eggs are packed in cartons of 12, and only full cartons are sold. How many full cartons does he sell in 4 weeks?", 23 * 5 * 4 // 12),
    ("Lena is 4 times as old as her brother Tim. In 6 years their ages will add up to 37. How old is Lena now?", (37 - 12) // 5 * 4),
    ("A cyclist rides 18 kilometers per hour for 2 hours and then 24 kilometers per hour for 3 hours. How many kilometers does she ride in total?", 18 * 2 + 24 * 3),
    ("A theater has 25 rows of 32 seats. On Friday 85 seats stay empty, and each ticket costs $9. How many dollars does the theater take in?", (25 * 32 - 85) * 9),
    ("Omar saves $15 a week. His sister saves twice as much, but started 4 weeks later. How many dollars have they saved together after Omar's 10th week?", 15 * 10 + 30 * 6),
    ("A rectangle is 8 centimeters longer than it is wide, and its perimeter is 64 centimeters. What is its area in square centimeters?", 12 * 20),
    ("A printer prints 22 pages a minute. It jams after 13 minutes, is repaired for 5 minutes, and then runs for another 8 minutes. How many pages does it print?", 22 * (13 + 8)),
    ("A jar holds 120 sweets. Ana takes a quarter of them, then Ben takes a third of what is left. How many sweets remain in the jar?", 120 - 30 - 30),
    ("A ferry carries 36 cars on each crossing and makes 7 crossings a day. On Sundays it makes only 4. How many cars can it carry in one week?", 36 * (6 * 7 + 4)),
    ("Paula walks 1,250 meters to school and the same way back, 5 days a week. How many kilometers does she walk in 6 weeks?", 1250 * 2 * 5 * 6 // 1000),
    ("A gardener plants 9 rows of tulips with 14 bulbs each and 6 rows of lilies with 11 bulbs each. Squirrels dig up 27 bulbs. How many bulbs are left?", 9 * 14 + 6 * 11 - 27),
    ("A recipe for 4 people needs 300 grams of rice. How many grams are needed for 14 people?", 300 * 14 // 4),
    ("Carl earns $18 an hour and one and a half times that for each hour over 40 in a week. How many dollars does he earn for 46 hours?", 18 * 40 + 27 * 6),
    ("A train has 8 coaches with 72 seats each. Five eighths of all seats are taken. How many seats are free?", 8 * 72 - 8 * 72 * 5 // 8),
    ("A shop buys mugs at $4 and sells them at $7. It buys 150 mugs and sells all but 12, which break. What is its profit in dollars?", (150 - 12) * 7 - 150 * 4),
    ("Nora has 5 more than twice as many stamps as Igor. Together they have 92 stamps. How many stamps does Nora have?", 92 - (92 - 5) // 3),
    ("A swimming pool loses 12 liters of water a day. It holds 4,500 liters on June 1 and is refilled with 150 liters every 10 days. How many liters does it hold after 30 days?", 4500 - 12 * 30 + 150 * 3),
    ("A class of 28 pupils goes to a museum. A ticket costs $6, but every 7th pupil is free. The bus costs $98. How many dollars does the trip cost in total?", (28 - 28 // 7) * 6 + 98),
    ("A snail climbs 7 centimeters every day and slips back 3 centimeters every night. The wall is 35 centimeters high. On which day does it reach the top?", (35 - 7) // (7 - 3) + 1),
    ("A library lends 340 books on Monday, 45 fewer on Tuesday, and on Wednesday twice as many as on Tuesday. How many books does it lend on the three days?", 340 + 295 + 590),
    ("A phone plan costs $12 a month and 5 cents for each message. In one month the bill is $27. How many messages were sent?", (27 - 12) * 100 // 5),
    ("Six machines make 240 bolts in 5 minutes. How many bolts do 9 such machines make in 8 minutes?", 240 // 6 // 5 * 9 * 8),
    ("A box of 48 crayons is shared among 5 children so that each gets the same number and as few as possible are left. How many crayons are left?", 48 % 5),
    ("Ruth runs a lap in 84 seconds and Sam in 96 seconds. Both run 15 laps. By how many seconds does Ruth win?", (96 - 84) * 15),
    ("A hotel has 12 floors with 16 rooms each. On a night 3 floors are closed, and 5 rooms on every open floor are empty. How many rooms are occupied?", (12 - 3) * (16 - 5)),
    ("A coat costs $160. Its price is cut by 25 percent, and a week later the new price is cut by another 10 percent. What does the coat cost now, in dollars?", 160 * 75 // 100 * 90 // 100),
    ("Jonas stacks 6 layers of bricks. The lowest layer has 40 bricks, and every other layer has 5 fewer than the one below. How many bricks does he use?", sum(40 - 5 * layer for layer in range(6))),
    ("A candle is 30 centimeters tall and burns down 2 centimeters an hour. Another is 24 centimeters tall and burns down 1 centimeter an hour. After how many hours are they equally tall?", (30 - 24) // (2 - 1)),
    ("A coffee machine makes 8 cups from 60 grams of coffee. How many cups does a bag of 900 grams make?", 900 // 60 * 8),
    ("In a parking lot there are cars and motorcycles, 30 vehicles with 104 wheels together. How many motorcycles are there?", (30 * 4 - 104) // 2),
    ("Emil picks 3 baskets of apples with 45 apples each. One in nine apples is rotten and thrown away. He packs the rest in bags of 8. How many bags does he fill?", 3 * 45 * 8 // 9 // 8),
    ("A video has 14,400 frames and plays at 24 frames per second. How many minutes long is it?", 14400 // 24 // 60),
    ("Tara has $200. She spends half of it on shoes, then a fifth of what is left on a scarf. How many dollars does she have now?", 200 - 100 - 20),
    ("A team wins 3 points for a victory and 1 point for a draw. It played 20 games, lost 4 and has 40 points. How many games did it win?", (40 - 16) // 2),
    ("A truck can carry 3,500 kilograms. It is loaded with 40 crates of 65 kilograms. How many more such crates can it carry?", 3500 // 65 - 40),
    ("An aquarium is 80 centimeters long, 50 centimeters wide and filled to a height of 35 centimeters. How many liters of water does it hold? A liter is 1,000 cubic centimeters.", 80 * 50 * 35 // 1000),
    ("Vera is paid $7 for each lawn and $4 for each hedge. She works on 9 lawns and some hedges and earns $91. How many hedges did she cut?", (91 - 9 * 7) // 4),
    ("A movie starts at 7:45 in the evening and lasts 138 minutes, and a break of 12 minutes comes on top. How many minutes before midnight does it end?", 24 * 60 - (19 * 60 + 45) - 138 - 12),
    ("A rope of 91 meters is cut into two pieces, one of them 6 times as long as the other. How many meters long is the longer piece?", 91 // 7 * 6),
    ("A baker needs 3 eggs for a cake and 2 for a tray of muffins. She has 60 eggs and bakes 12 cakes. How many trays of muffins can she bake with the rest?", (60 - 12 * 3) // 2),
    ("The sum of three consecutive whole numbers is 144. What is the largest of them?", 144 // 3 + 1),
    ("A concert hall sells 420 tickets. A child's ticket costs $8 and an adult's $15. The hall takes in $5,460. How many adult tickets were sold?", (5460 - 420 * 8) // 7),
    ("A factory makes 125 toys an hour. Two of every 50 are faulty. How many good toys does it make in an 8-hour shift?", 125 * 8 * 48 // 50),
    ("Hugo reads a book of 372 pages. He has read two thirds of it and reads 31 pages a day from now on. How many days does he still need?", 372 // 3 // 31),
    ("A taxi ride costs $4 plus $2 for each kilometer. Iris rides 13 kilometers and gives a tip of $5. How many dollars does she pay?", 4 + 2 * 13 + 5),
    ("Two trains start toward each other from cities that are 540 kilometers apart, one at 80 and the other at 100 kilometers per hour. After how many hours do they meet?", 540 // (80 + 100)),
    ("A zoo has 3 times as many monkeys as lions and 5 fewer giraffes than lions. It has 12 lions. How many animals of these kinds does it have?", 12 + 3 * 12 + 12 - 5),
    ("A wall of 6 meters by 4 meters is covered with square tiles with sides of 20 centimeters. How many tiles are needed?", (600 // 20) * (400 // 20)),
    ("Finn collects 11 shells on the first day and on each following day 4 more than on the day before. How many shells does he collect in 5 days?", sum(11 + 4 * day for day in range(5))),
    ("A pack of 6 bottles costs $5, a single bottle $1. What is the lowest price in dollars for 27 bottles?", 4 * 5 + 3),
    ("Greta pours 2 liters of juice into glasses of 150 milliliters. How many milliliters are left after she has filled as many glasses as possible?", 2000 % 150),
    ("A company has 240 employees. 35 percent work in sales, and a quarter of those in sales work abroad. How many of its salespeople work abroad?", 240 * 35 // 100 // 4),
    ("Kim has 17 coins, all of 10 and 20 cents, worth 2 dollars and 50 cents. How many 20-cent coins does Kim have?", (250 - 17 * 10) // 10),
    ("A hiking trail is 21 kilometers long. Lea walks 4 kilometers per hour and rests 15 minutes after every full hour of walking. She starts at 9:00. How many kilometers has she walked by 11:30?", 2 * 4),
    ("A web shop ships 1,232 parcels in a week: equally many on each day from Monday to Friday, and half as many on Saturday. How many does it ship on Saturday?", 1232 // 11),
    ("Max's grandmother is 8 times as old as Max. In 12 years she will be 4 times as old as he will be then. How old is Max now?", (4 * 12 - 12) // (8 - 4)),
    ("A box weighs 2 kilograms when empty and 17 kilograms when filled with 30 equal books. How many grams does one book weigh?", (17 - 2) * 1000 // 30),
    ("A well is 24 meters deep, and its rope passes over a drum that takes up 80 centimeters of rope at each turn. How many turns lift the bucket from the bottom to the top?", 2400 // 80),
    ("A juggler drops a ball on 3 of every 40 throws. In one show he makes 480 throws. How many times does he catch the ball?", 480 - 480 // 40 * 3),
    ("A square garden has a fence of 52 meters around it. A path one meter wide runs along the inside of the fence. How many square meters are left inside the path?", (13 - 2) ** 2),
    ("Alma bakes 96 cookies. She keeps 12 for herself and gives the rest to 7 neighbors in equal shares. How many cookies does each neighbor get?", (96 - 12) // 7),
    ("A radio station plays 14 songs an hour from 6:00 to 10:00 and 11 songs an hour from 10:00 to 18:00. How many songs does it play from 6:00 to 18:00?", 14 * 4 + 11 * 8),
    ("Of the 180 trees in an orchard, 2 in 5 are apple trees, a third are pear trees, and the rest are plum trees. How many plum trees are there?", 180 - 72 - 60),
    ("A subscription costs $9 for the first month and $14 for every month after it. How many dollars does a full year cost?", 9 + 14 * 11),
    ("Two pumps fill a basin of 2,400 liters together in 30 minutes. One of them alone delivers 35 liters a minute. How many liters a minute does the other deliver?", 2400 // 30 - 35),
]  # fmt: skip
