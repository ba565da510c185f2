"""Secrets in what people and jobs write: which names announce one, which values are one, and a text without them.

One function for all that is shown or kept for showing: jobs, refusals, events, logs. It looks at names (PGPASSWORD,
GITHUB_PAT, --api-key) and into values, whatever they are called: the user:password of a URL, signatures and tokens in
its query, tokens of known makers, private keys. What it cannot know is a secret without a name or a form.

In all of it the time is linear in the length: jobs send what they like.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from functools import lru_cache
from typing import Any, Final

HIDDEN: Final = "***"
"""What stands in the place of a secret."""


class Sureness(IntEnum):
    """How sure is a name that its value is a secret?"""

    NOT = 0
    PERHAPS = 1
    """KEY, TOKENS: in training these are columns and pieces of text too. A secret where the value looks random."""
    LIKELY = 2
    """TOKEN, PAT: a secret unless the value is a number or a special token, such as <pad>."""
    SURE = 3


def sureness(name: str) -> Sureness:
    """Of a variable, a flag, a field or a parameter, by the parts of its name."""
    return _sureness(name[-_LONGEST_NAME:])


def names_secret(name: str) -> bool:
    """May a value of this name be one?"""
    return sureness(name) is not Sureness.NOT


def redacted(text: str, name: str = "") -> str:
    """The text with HIDDEN in the place of what is secret in it; all of it where that is a secret by this name."""
    if name and _is_secret(sureness(name), text):
        return HIDDEN
    if "PRIVATE KEY" in text:
        text = _PRIVATE_KEY.sub(HIDDEN, text)
    if len(text) > _LONG:  # of a log: most lines have nothing in them that could be one
        return "".join(map(_redacted, text.splitlines(keepends=True)))
    return _redacted(text)


def _redacted(text: str) -> str:
    lower = text.lower()
    if not any(hint in lower for hint in _HINTS):
        return text
    text = _URL.sub(_in_url, text)
    text = _MAKERS.sub(HIDDEN, text)
    text = _HEADER.sub(rf"\1{HIDDEN}", text)
    text = _BEARER.sub(rf"\1{HIDDEN}", text)
    text = _without_quoted(text)
    for pattern in _GIVEN:
        text = pattern.sub(_given, text)
    return _SAID.sub(_said, text)


def redacted_json(value: Any, name: str = "") -> Any:
    """The same of every text in a JSON value. name: of the field that it is in."""
    if isinstance(value, str):
        return redacted(value, name)
    if isinstance(value, Mapping):
        of = next((value[key] for key in _NAMING if isinstance(value.get(key), str)), "")  # {"name": ..., "value": ...}
        names = {key: of if key == "value" and names_secret(of) else key for key in value}
        return {redacted(key): redacted_json(inner, names[key]) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return redacted_words([redacted_json(inner, name) for inner in value])
    return value


def redacted_words(words: Iterable[Any]) -> list[Any]:
    """Of a command line: also what stands behind a flag such as --password."""
    found: list[Any] = []
    flag = ""
    for word in words:
        is_text = isinstance(word, str)
        hidden = flag and is_text and not word.startswith("--") and _is_secret(sureness(flag), word)
        found.append(HIDDEN if hidden else word)
        flag = word if is_text and word.startswith("-") and "=" not in word else ""
    return found


def hidden_in(value: Any, path: str = "") -> Iterator[str]:
    """Where a JSON value has HIDDEN in the place of a secret: somebody has copied what was shown."""
    if isinstance(value, str):
        if value == HIDDEN or _SHOWN.search(value):
            yield path
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from hidden_in(inner, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from hidden_in(inner, f"{path}.{index}".lstrip("."))


class Redacting(logging.Formatter):
    """Lines of a log without secrets, whatever was written into them."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, traceback included."""
        return redacted(super().format(record))


# names

_LONGEST_NAME = 200
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SURE = re.compile(
    "pass(word|wd|phrase|code)|secret|credential|(api|access|account|private|signing|encryption|master|shared|ssh|auth)"
    "key|(auth|access|bearer|refresh|session|security|bot)token|signature"
)
_SURE_WORDS = frozenset({"pwd", "bearer", "jwt", "cookie", "cookies", "authorization", "pw", "creds", "cred"})
_LIKELY_WORDS = frozenset({"token", "pat", "sig"})
_PERHAPS_WORDS = frozenset({"key", "keys", "tokens", "auth", "sas", "pass"})
_ENDS = ("token",)
_OF_TEXT = frozenset(
    {"pad", "eos", "bos", "unk", "mask", "sep", "cls", "start", "end", "stop", "special", "image", "max", "min", "num"}
    | {"per", "mean", "sort", "prefix", "suffix", "decoder", "begin", "forced", "suppress"}
)
"""Words beside TOKEN that make it one of a tokenizer."""
_PLACES = frozenset({"file", "path", "dir", "directory", "folder"})
"""A name that ends so says where a secret is, not which."""
_NO_SECRETS = frozenset({"pwd", "oldpwd"})
"""Of every shell: the folder."""


@lru_cache(maxsize=4096)
def _sureness(name: str) -> Sureness:
    words = [word.rstrip("0123456789") for word in re.split(r"[^a-z0-9]+", _CAMEL.sub("_", name).lower()) if word]
    if not words or words[-1] in _PLACES or (len(words) == 1 and words[0] in _NO_SECRETS):
        return Sureness.NOT
    squeezed = "".join(words)
    if _SURE.search(squeezed) or not _SURE_WORDS.isdisjoint(words):
        return Sureness.SURE
    if not _LIKELY_WORDS.isdisjoint(words) or any(word.endswith(_ENDS) for word in words):
        return Sureness.NOT if not _OF_TEXT.isdisjoint(words) else Sureness.LIKELY
    return Sureness.NOT if _PERHAPS_WORDS.isdisjoint(words) else Sureness.PERHAPS


# values

_REFERENCE = r"(?:\$(?:[a-z_]\w*|[0-9@*#?]|\{\w+(?::?\?[^}]*|:?[-+=])?\}?)|%\w+%|%\(\w+\)?s?|%[sdr](?!\w))[/:@._-]{0,3}"
"""To a variable, without a literal such as the default in ${NAME:-default}; several may stand side by side."""
_NO_VALUE = re.compile(
    r"(?is)(true|false|yes|no|on|off|none|null|nil|required|optional|missing|\*\*\*.*|[=<\[({].*|\$\(.*|\$\{\{.*|"
    rf"(?:{_REFERENCE})+)?"
)
"""Neither a secret nor a part of one: a truth, references to variables and nothing else, what is hidden already."""
_NUMBER = re.compile(r"[-+]?[0-9_.,]{1,40}([eE][-+]?[0-9]{1,5})?[kKmMgG%]?")
_RANDOM = re.compile(r"(?=[^0-9]{0,64}[0-9])(?=[^A-Za-z]{0,64}[A-Za-z])[A-Za-z0-9+/=_.~-]{16,}")


def _is_secret(sure: Sureness, value: str) -> bool:
    if sure is Sureness.NOT or _NO_VALUE.fullmatch(value):
        return False
    if sure is Sureness.SURE:
        return True
    if _NUMBER.fullmatch(value):
        return False
    return sure is Sureness.LIKELY or _RANDOM.fullmatch(value) is not None


# texts

_LONG = 4096
_HINTS = (
    *(
        "://",
        "pass",
        "pwd",
        "secret",
        "token",
        "key",
        "cred",
        "bearer",
        "auth",
        "cookie",
        "sig",
        "sas",
        "jwt",
        "pat",
        "pw",
    ),
    *("gho_", "ghp_", "ghr_", "ghs_", "ghu_", "glpat-", "hf_", "sk-", "xox", "akia", "asia", "aiza", "eyj", "npm_"),
    *("pypi-", "twp_"),
)
"""Nothing is to be hidden in a text without one of these: most have none."""
_PRIVATE_KEY = re.compile(r"(?s)-----BEGIN [A-Z ]{0,30}PRIVATE KEY.*?(?:-----END [A-Z ]{0,30}PRIVATE KEY-----|\Z)")
_MAKERS = re.compile(
    r"(?<![A-Za-z0-9_-])(?:"
    r"gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|hf_[A-Za-z0-9]{16,}|npm_[A-Za-z0-9]{30,}|"
    r"twp_[\w-]{16,}|dckr_pat_[\w-]{16,}|(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])|AIza[\w-]{35}|"
    r"(?:sk|xox[abposr]|pypi)-(?=[a-z0-9_-]{0,64}[A-Z])[\w-]{20,}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*)"
)
"""GitHub, GitLab, Hugging Face, npm, this service, Docker, AWS, Google, OpenAI, Slack, PyPI; and JSON web tokens."""
_BEARER = re.compile(r"(?<![A-Za-z])(bearer[ \t]{1,3})(?!\*\*\*)[A-Za-z0-9._~+/=-]{16,}", re.IGNORECASE)
_URL = re.compile(r"(?P<before>[A-Za-z0-9+.-]{0,16})://(?P<rest>[^\s\"'<>\\`]+)")
_PARAMETER = re.compile(r"([?&;#])([^=&;#?]{1,64})=([^&;#]*)")
_BUCKETS = ("s3", "s3a", "s3n", "gs", "gcs", "az", "abfs", "abfss")
_NAMING = ("name", "key")
"""Of an item that has its name in one field, and in `value` the other half: variables of Kubernetes, properties."""
_SCHEMES = "Basic|Bearer|Token|Negotiate|NTLM|ApiKey|Key|DPoP|GoogleLogin"
_HEADER = re.compile(
    r"(?i)(?<![\w-])((?:proxy-)?authorization(?:\\{0,3}[\"'])?[ \t]{0,3}[:=][ \t]{0,3}(?:\\{0,3}[\"'])?"
    rf"(?=(?:{_SCHEMES}|Digest|Hawk|OAuth|AWS4-[\w-]{{1,40}})[ \t])"
    r"|(?:set-)?cookie2?(?:\\{0,3}[\"'])?[ \t]{0,3}:[ \t]{0,3}(?:\\{0,3}[\"'])?(?=[^\s=;,\"'\\]{1,64}=))"
    rf"(?:(?:{_SCHEMES})[ \t]+(?!<[a-z])[^\s\"',;\\]+"
    r"|(?:Digest|Hawk|OAuth|AWS4-[\w-]{1,40})[ \t][^\r\n]*"
    r"|[^\s=;,\"'\\]{1,64}=[^\s;\"'\\]*(?:;[ \t]{0,3}[^\s=;,\"'\\]{1,64}(?:=[^\s;\"'\\]*)?)*)"
)
"""Of HTTP, wherever they stand: who asks, by a scheme and what proves it; all cookies. A scheme of many parts hides the
rest of its line."""
_SHOWN = re.compile(rf"://{re.escape(HIDDEN)}@|[=:>][ \t]{{0,3}}\\{{0,3}}[\"']?{re.escape(HIDDEN)}(?!\w)")
"""A text in which something has been hidden."""
_SCHEME = re.compile(r"(?i)\A(?:Bearer|Basic|Token)[ \t]+")
"""Before what proves who asks, which may be a word such as <token> in its place."""
_VALUE = r"(?:(?i:Bearer|Basic|Token)[ \t]+)?[^\s\"'&,;]+"
_QUOTED = re.compile(
    r"(?<![\w.-])(?P<name>[\w.-]{2,64})(?:\\{0,3}[\"'])?\]?[ \t]{0,3}(?::=|=>|[:=])[ \t]{0,3}"
    r"(?:\w{1,30}\(|[bBrRuUfF]{1,2})?(?P<quote>\\{0,3}(?:\"{3}|'{3}|\"|'))"
)
"""name="value of words", also as a call, an item, or inside of another text in quotes: up to the value."""
_GIVEN = (
    # NAME=value, name = "value", "name": "value", 'name':value
    re.compile(
        rf"(?<![\w.-])(?P<name>[\w.-]{{2,64}})(?P<between>[\"']?[ \t]{{0,3}}=[ \t]{{0,3}}[\"']?"
        rf"|[\"'][ \t]{{0,3}}:[ \t]{{0,3}}[\"']|:[\"']?(?!//))(?P<value>{_VALUE})"
    ),
    # name: value, alone in its line, or an item of a list, or the first one in braces; then a comma, or a comment
    re.compile(
        r"(?m)(?P<between>^[ \t]{0,40}(?:[-<>*][ \t]{1,3})?|(?<=\{)[ \t]{0,3})(?P<name>[\w.-]{2,64})"
        rf"[ \t]{{0,3}}:[ \t]{{1,3}}[\"']?(?P<value>{_VALUE})(?=[\"']?[ \t]*(?:,|\r?$)|[\"']?[ \t]+\#|(?<=\}}))"
    ),
    # the last one in braces
    re.compile(
        rf"(?P<between>(?<=,)[ \t]{{0,3}})(?P<name>[\w.-]{{2,64}})[ \t]{{0,3}}:[ \t]{{1,3}}(?P<value>{_VALUE})(?<=\}})"
    ),
    # "name: value", as a header is written
    re.compile(rf"(?<=[\"'])(?P<name>[\w.-]{{2,64}})(?P<between>:[ \t]{{1,3}})(?P<value>{_VALUE})(?=\\{{0,3}}[\"'])"),
    # <name>value</name>
    re.compile(r"(?P<between><(?P<name>[\w.:-]{2,64})(?:[ \t][^<>]{0,200})?>)(?P<value>[^<>]+)(?=</(?P=name)[ \t]*>)"),
    # name="name" value="value", of an element or as JSON
    re.compile(
        r"(?i:(?<![\w-])(?:name|key)(?:\\{0,3}[\"'])?[ \t]{0,3}[:=][ \t]{0,3}(?:\\{0,3}[\"'])?)(?P<name>[\w.-]{2,64})"
        r"(?P<between>(?:\\{0,3}[\"'])?[ \t,]{1,4}(?:\\{0,3}[\"'])?(?i:value)(?:\\{0,3}[\"'])?[ \t]{0,3}[:=][ \t]{0,3}"
        r"(?:\\{0,3}[\"'])?)(?P<value>[^\"'\\,}<>\s]+(?:[^\"'\\,}<>\r\n]{0,1000}(?=\\{0,3}[\"']))?)"
    ),
    # --name value
    re.compile(r"(?<![^\s\"'])(?P<name>--[\w.-]{2,64})(?P<between>[ \t]{1,3}[\"']?)(?P<value>[^\s\"'-][^\s\"']*)"),
)


_SAID = re.compile(
    r"(?<![^\s\"'])(?P<name>[\w.-]{2,64})(?P<between>(?::[ \t]{1,3}|[\"'],[ \t]{0,3})[\"']?)"
    rf"(?P<value>{_RANDOM.pattern})(?![\w.])"
)
"""name: value, or "name", "value", anywhere, where the value looks random: of names that are more than KEY."""


def _without_quoted(text: str) -> str:
    """Values in quotes are hidden up to the quote that ends them, or the line, blanks and commas included."""
    found: list[str] = []
    shown = at = 0
    while (match := _QUOTED.search(text, at)) is not None:
        at = match.end()
        if (sure := sureness(match["name"])) is Sureness.NOT:
            continue  # there may be one inside
        end = re.compile(rf"(?<!\\){re.escape(match['quote'])}|\n").search(text, at)
        stop = len(text) if end is None else end.start()
        if _is_secret(sure, text[at:stop]):
            found += [text[shown:at], HIDDEN]
            shown = at = stop
    return "".join([*found, text[shown:]])


def _given(match: re.Match[str]) -> str:
    value = match["value"].rstrip("})]")
    if not _is_secret(sureness(match["name"]), _SCHEME.sub("", value, count=1)):
        return match[0]
    start = match.start()
    return f"{match[0][: match.start('value') - start]}{HIDDEN}{match[0][match.start('value') - start + len(value) :]}"


def _said(match: re.Match[str]) -> str:
    return f"{match['name']}{match['between']}{HIDDEN}" if sureness(match["name"]) >= Sureness.LIKELY else match[0]


def _in_url(match: re.Match[str]) -> str:
    """One or several, where nothing but a comma stands between them."""
    scheme, found = match["before"].lower(), [match["before"]]
    for part in match["rest"].split("://"):
        found.append(_PARAMETER.sub(_parameter, _without_user(part, scheme)))
        scheme = re.split(r"[^a-z0-9+.-]", part[-16:].lower())[-1]
    return "://".join(found)


def _without_user(part: str, scheme: str) -> str:
    """What stands behind ://, without user:password@; before an http a name alone is a token too.

    A password may have slashes in it, as the keys of AWS have: it then ends at the last @.
    """
    host = re.split(r"[/?#]", part, maxsplit=1)[0]
    at = host.rfind("@")
    if at < 0:
        user, colon, rest = host.partition(":")
        is_port = host.startswith("[") or (rest.isdecimal() and scheme not in _BUCKETS) or not rest
        at = -1 if not colon or is_port else part.partition("?")[0].rfind("@")
    if at < 0:
        return part
    user, colon, password = part[:at].partition(":")
    if user == HIDDEN or not (password or (user and not colon and scheme.endswith(("http", "https")))):
        return part
    return f"{HIDDEN}{part[at:]}"


def _parameter(match: re.Match[str]) -> str:
    mark, name, value = match.groups()
    hides = names_secret(name) and value and not value.startswith(HIDDEN)
    return f"{mark}{name}={HIDDEN}" if hides else match[0]
