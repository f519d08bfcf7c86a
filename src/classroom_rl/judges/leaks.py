"""Searches a tutor's message for an answer that the student should find: the one search of all embedded judges,
supervisors, the post-test's ledger and the metrics.

It looks for the answer and not for single disguises. The message is brought into a plain form (`folded`), and into
every form that a reader could decode it to: backwards, shifted letters, digits for letters, initials, every second
letter or word, codes of computers. In these forms it looks for the answer's words. judges/leaked_values.py looks for
the value of a number.
"""

import base64
import binascii
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import unquote

from classroom_rl.judges.prompt_injection import as_latin, joined, undisguised
from classroom_rl.judges.reference_answers import NUMBER_WORDS
from classroom_rl.rollout.text import UNSPACED

WHOLE_WORDS, PACKED, RUN_TOGETHER = 5, 5, 8
"""The fewest letters of an answer that is looked for in a decoded text: as whole words, in decoded letters without
spaces, and in words that are run together. Shorter ones occur by chance."""

LONG_WORD = 14
"""In letters. A longer word may be several that were run together."""

LONGEST = 2000
"""In characters. Of a longer text only the beginning is decoded: judges reject such messages as a whole."""

IN_ORDER = 10
"""The fewest letters of an answer whose letters are looked for in order, with up to two others after each."""

_SMALL_CAPITALS = str.maketrans("ᴀʙᴄᴅᴇꜰғɢʜɪᴊᴋʟᴍɴᴏᴘǫʀꜱᴛᴜᴠᴡʏᴢ", "abcdeffghijklmnopqrstuvwyz")
_TURNED = "ɐɔǝɟƃɥᴉɾʞɯɹʇʌʍʎ"
_UPRIGHT = str.maketrans(_TURNED + "qpbdnu", "acefghijkmrtvwy" + "bdqpun")
_ROTATED = [
    str.maketrans(string.ascii_lowercase, string.ascii_lowercase[shift:] + string.ascii_lowercase[:shift])
    for shift in range(1, 26)
] + [str.maketrans(string.ascii_lowercase, string.ascii_lowercase[::-1])]
_LEET = [str.maketrans("4@83601!|5$7+9", f"aabego{one}{mark}lsstt{nine}") for one, mark, nine in ("iig", "lig", "llg")]
_HAS_LEET = re.compile(r"[a-z][0-9@$!|+]+[a-z]|[0-9@$]+[a-z]{2}|[a-z]{2}[0-9@$]+", re.IGNORECASE)
_LEET_SIGN = re.compile(r"[0-9@$|+]")
_MORSE_SIGNS = (
    ".- -... -.-. -.. . ..-. --. .... .. .--- -.- .-.. -- -. --- .--. --.- .-. ... - ..- ...- .-- -..- -.-- --.."
)
_MORSE = dict(zip(_MORSE_SIGNS.split(), string.ascii_lowercase, strict=True))
_MORSE_RUN = re.compile(r"(?<![\w.-])[.-]{1,4}(?:[ /|]+[.-]{1,4}){3,}")
_BASE64 = re.compile(r"(?<![\w+/=])[A-Za-z0-9+/_-]{4,}={0,2}(?![\w+/=])")
_HEX = re.compile(r"(?<!\w)(?:(?:0x|\\x)?[0-9a-fA-F]{2}[\s,:;-]*){3,}(?!\w)")
_ENTITY = re.compile(r"&#(x[0-9a-fA-F]+|\d+);|\\u([0-9a-fA-F]{4})")
_ENTITIES = re.compile(r"(?:\S*(?:&#|\\u)\S+\s*)+")
_QUOTED = re.compile(r"\S*%[0-9a-fA-F]{2}\S*")
_NUMBERS = re.compile(r"(?<![\w.])(?:\d{1,3}[\s,.;:-]+){3,}\d{1,3}(?![\w])")
_BITS = re.compile(r"(?<!\w)(?:[01]{7,8}\s*){3,}")
_BYTE = re.compile(r"[01]{7,8}")
_SPELT_OUT = re.compile(r"(?<!\w)\w(?:\W{1,3}\w(?!\w)){3,}")
_MASKED = re.compile(r"[^\W\d_]*[_*•#?…~]+[^\W\d_]+")
_SENTENCE_END = re.compile(r"(?<!\.)[.?!](?!\.)")
_VOWELS = re.compile("[aeiouy]")
_TOKEN = re.compile(r"\w+")


@lru_cache(maxsize=2048)
def folded(text: str) -> str:
    """The words of a text in their plainest form, separated by spaces: in lower case, NFKC, without combining marks,
    with Latin letters for look-alikes, ASCII digits for those of every script, and words for small numbers."""
    plain = text
    if not text.isascii():
        plain = as_latin(undisguised(text).translate(_SMALL_CAPITALS))
        if not UNSPACED.search(plain):
            plain = unicodedata.normalize("NFD", plain)
    words = _TOKEN.findall("".join(map(_plain_character, plain.casefold())) if not plain.isascii() else plain.lower())
    spelt_words = (
        NUMBER_WORDS[int(word)] if len(word) < 3 and word.isdecimal() and int(word) <= 20 else word for word in words
    )
    return " ".join(spelt_words).replace("_", " ")


def _plain_character(character: str) -> str:
    if unicodedata.category(character) == "Mn":
        return ""
    return str(unicodedata.decimal(character)) if character.isdecimal() else character


@dataclass(frozen=True)
class _Decoded:
    """What a text can be decoded to. Each part joins several decoded texts, with bars between them.

    Attributes:
        words: decoded words with spaces. No word is there because the text holds it plainly.
        packed: decoded letters without spaces.
        mixed: texts in which decoded words stand beside plain ones.
        plain: the words of the text as they are.
        together: the letters of the text, forwards and backwards.
        consonants: the words of the text that lack vowels.
        marked: the words of the text that have a mark in place of a letter.
    """

    words: str
    packed: str
    mixed: str
    plain: str
    together: str
    consonants: str
    marked: tuple[str, ...]


@lru_cache(maxsize=1024)
def _decoded(text: str) -> _Decoded:
    """Every form that a text can be decoded to."""
    text = text[:LONGEST]
    plain = folded(text)
    words, letters = plain.split(), plain.replace(" ", "")
    decoded = [*map(folded, transported(text)), " ".join(word[::-1] for word in words), plain[::-1]]
    decoded += (plain.translate(table) for table in _ROTATED)
    decoded += (
        " ".join(map(_last_letter_first, candidate))
        for candidate in (words, [word.removesuffix("ay") for word in words])
    )
    decoded += _spelt_out(text)
    mixed = [" ".join(words[start::2]) for start in (0, 1)]
    for alone, in_text in _with_signs(text):
        decoded.append(alone)
        mixed.append(in_text)
    packed = ["".join(word[0] for word in words), "".join(word[-1] for word in words)]
    packed += (letters[start::step] for step in (2, 3) for start in range(step))
    packed += (part for word in words if len(word) >= LONG_WORD and word.isascii() for part in (word, word[::-1]))
    packed += _spelt_by_numbers(text)
    packed += (_of_morse(code) for run in _MORSE_RUN.findall(text) for code in (run, run[:-1]))
    consonants = [word for word in words if word.isalpha() and word.isascii() and not _VOWELS.search(word)]
    return _Decoded(
        f" {' | '.join(decoded)} ",
        "|".join(packed),
        f" {' | '.join(mixed)} ",
        f" {plain} ",
        f"{letters}|{letters[::-1]}",
        f" {' '.join(consonants)} ",
        tuple(token.casefold() for token in _MASKED.findall(text)),
    )


def _with_signs(text: str) -> Iterator[tuple[str, str]]:
    """The words with signs in them, read without the signs or with letters for them: alone, and in the whole text."""
    latin = as_latin(undisguised(text))
    tokens = latin.split()
    if joined(latin) != latin:
        yield folded(" ".join(joined(token) for token in tokens if joined(token) != token)), folded(joined(latin))
    if _HAS_LEET.search(latin):
        signed = " ".join(token for token in tokens if _LEET_SIGN.search(token))
        yield from ((folded(signed.translate(table)), folded(latin.translate(table))) for table in _LEET)
    if any(character in text for character in _TURNED):
        turned = [token for token in tokens if any(character in token for character in _TURNED)]
        yield tuple(folded(part.casefold().translate(_UPRIGHT)[::-1]) for part in (" ".join(turned), latin))


def _spelt_out(text: str) -> Iterator[str]:
    for run in _SPELT_OUT.findall(as_latin(undisguised(text))):
        letters = folded(run).replace(" ", "")
        yield letters
        yield letters[::-1]


@lru_cache(maxsize=1024)
def transported(text: str) -> tuple[str, ...]:
    """The plain texts of what a computer encodes for transport: base 64, hexadecimal or binary bytes, URL, entities."""
    decoded = []
    decoded += (unquote(token) for token in _QUOTED.findall(text))
    decoded += (_ENTITY.sub(_character_of, run) for run in _ENTITIES.findall(text))
    for token in _BASE64.findall(text):
        if not token.isalpha() or not (token.islower() or token.istitle() or token.isupper()):
            decoded += _ascii_of_base64(token)
    decoded += map(_ascii_of_hex, _HEX.findall(text))
    decoded += (_ascii(bytes(int(bits, 2) for bits in _BYTE.findall(run))) for run in _BITS.findall(text))
    return tuple(filter(None, decoded))


def _ascii_of_hex(run: str) -> str:
    digits = re.sub(r"0x|\\x|[^0-9a-fA-F]", "", run)
    return _ascii(bytes.fromhex(digits)) if len(digits) % 2 == 0 else ""


def _last_letter_first(word: str) -> str:
    return word[-1:] + word[:-1]


def _of_morse(run: str) -> str:
    return "".join(_MORSE.get(sign, "|") for sign in re.split(r"[ /|]+", run))


def _character_of(match: re.Match) -> str:
    code = match[1] or f"x{match[2]}"
    number = int(code[1:], 16) if code.startswith("x") else int(code)
    return chr(number) if number < 0x110000 and not 0xD800 <= number < 0xE000 else " "


def _ascii_of_base64(token: str) -> Iterator[str]:
    padded = token.rstrip("=").replace("-", "+").replace("_", "/")
    try:
        yield _ascii(base64.b64decode(padded + "=" * (-len(padded) % 4), validate=True))
    except binascii.Error:
        return


def _ascii(data: bytes) -> str:
    """The text of bytes; "" unless all are printable."""
    text = data.decode("utf-8", "replace")
    return text if text.isprintable() and "\ufffd" not in text else ""


def _spelt_by_numbers(text: str) -> Iterator[str]:
    """Letters for runs of numbers: places in the alphabet, or character codes."""
    for run in _NUMBERS.findall(text):
        numbers = [int(number) for number in re.findall(r"\d+", run)]
        yield "".join(chr(96 + number) if 0 < number < 27 else "|" for number in numbers)
        yield "".join(chr(number).lower() if 32 < number < 127 else "" if number == 32 else "|" for number in numbers)


@dataclass(frozen=True)
class _Target:
    """An answer to look for: its folded words, its letters, and its words without vowels."""

    words: tuple[str, ...]
    letters: str
    consonants: str


@lru_cache(maxsize=4096)
def _target(answer: str) -> _Target:
    words = tuple(folded(answer).split())
    consonants = " ".join(filter(None, (_VOWELS.sub("", word) for word in words)))
    return _Target(words, "".join(words), consonants)


def _in_order(letters: str, text: str) -> bool:
    """Whether a text has these letters in their order, with up to two others after each. Linear in the text: a pattern
    would try all ways to read a text in which every letter is written three times."""
    positions = {position for position, character in enumerate(text) if character == letters[0]}
    for letter in letters[1:]:
        positions = {
            end
            for position in positions
            for end in range(position + 1, min(position + 4, len(text)))
            if text[end] == letter and "|" not in text[position + 1 : end]
        }
    return bool(positions)


def hides(text: str, answers: Iterable[str]) -> bool:
    """Whether a text holds one of the answers in a form that has to be decoded. An answer of fewer than `WHOLE_WORDS`
    letters is never found."""
    decoded = _decoded(text)
    return any(_is_hidden(_target(answer), decoded) for answer in answers)


def _is_hidden(target: _Target, decoded: _Decoded) -> bool:
    letters = target.letters
    if len(letters) < WHOLE_WORDS:
        return False
    if f" {' '.join(target.words)} " in decoded.words or letters in decoded.packed:
        return True
    if len(letters) >= RUN_TOGETHER and letters in decoded.words:
        return True
    if len(target.words) > 1 and f" {letters} " in decoded.plain:
        return True
    lacks_vowels = len(target.consonants) > 2 and target.consonants != " ".join(target.words)
    if lacks_vowels and f" {target.consonants} " in decoded.consonants:
        return True
    longest = max(target.words, key=len)
    return len(longest) >= WHOLE_WORDS and any(_is_masked(token, longest) for token in decoded.marked)


def _is_masked(token: str, word: str) -> bool:
    """Whether a token is the word with marks in place of some letters."""
    parts = re.findall(r"[^\W\d_]+|[\W\d_]+", token)
    pattern = "".join(part if part.isalpha() else f".{{1,{len(part)}}}" for part in parts)
    return sum(map(str.isalpha, token)) * 2 >= len(word) and re.fullmatch(pattern, word) is not None


@lru_cache(maxsize=4096)
def shows(text: str, answer: str) -> bool:
    """Whether a text holds an answer: as it is, in other forms of its letters, its words as a set among few others, its
    letters in order among few others, or in a code."""
    target, plain = _target(answer), folded(text)
    if not target.words:
        return False
    if UNSPACED.search(answer):
        return target.letters in plain.replace(" ", "") or hides(text, [answer])
    if f" {' '.join(target.words)} " in f" {plain} {_decoded(text).mixed}" or hides(text, [answer]):
        return True
    if len(target.letters) < RUN_TOGETHER:
        return False
    together = _decoded(text).together
    if target.letters in together:
        return True
    words = set(plain.split())
    if len(target.letters) >= IN_ORDER and 2 * sum(word in words for word in target.words) < len(target.words):
        return _in_order(target.letters, together)
    count = len(target.words)
    if count < 3 or not words.issuperset(target.words):
        return False
    parts = [part for part in map(folded, _SENTENCE_END.split(text)) if part]
    in_sentence = any(_in_window(part.split(), target.words, 2 * count) for part in parts)
    return in_sentence or _in_window(plain.split(), target.words, count + 1)


def _in_window(words: list[str], answer: tuple[str, ...], width: int) -> bool:
    """Whether `width` words in a row hold all words of the answer."""
    counts = Counter(answer)
    return any(counts <= Counter(words[start : start + width]) for start in range(max(1, len(words) - width + 1)))


def says_new(text: str, word: str, earlier: Iterable[str], always: Iterable[str] = ()) -> bool:
    """Whether a text says a word that the conversation did not show earlier after the same word. So a teacher may
    repeat "you boiled" after the student's "I boiled", and not say "she boiled". After a word of `always` it counts,
    whatever was shown."""
    shown = set().union(*(_words_before(message, word) for message in earlier))
    return any(before in always or before not in shown for before in _words_before(text, word))


@lru_cache(maxsize=2048)
def _words_before(text: str, word: str) -> frozenset[str]:
    """The words directly before each place of `word`; the speakers' persons count as one."""
    words = folded(text).split()
    before = (words[index - 1] if index else "" for index, token in enumerate(words) if token == word)
    return frozenset("you" if token == "i" else token for token in before)
