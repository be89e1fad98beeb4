"""Takes out of a text what nobody else should read: keys and tokens, invites, who and where somebody is. Pure.

    redactor = Redactor(home="/home/ana", user="ana", hosts=["ana-pc"])
    redactor.redact("Bearer x1 for ana@ana-pc at 192.168.1.7")    # Bearer <removed> for <user>@host-1 at address-1

Invariants
* The same host or address has the same placeholder in all texts that one `Redactor` has seen, so that a reader can
  still tell who spoke to whom. Loopback addresses stay.
* Done twice it is done once: placeholders are left alone, and rules are applied until nothing changes.
* It rather takes too much: any long word that looks made by chance goes, the path of any web address too. What it
  cannot know is a short secret that nothing stands in front of: who hands a report on reads it first.
* Whatever the text, the time is bounded: patterns do not try again what they have consumed.
"""

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

REMOVED = "<removed>"
USER = "<user>"
MOST_ROUNDS = 8
MOST_NAMES = 300
MOST_DEPTH = 12
LOCAL = ("localhost", "ip6-localhost", "localhost.localdomain")
PLACEHOLDER = re.compile(r"(host|address)-\d+", re.IGNORECASE)
GENERIC = {
    "root", "user", "users", "home", "admin", "administrator", "ubuntu", "debian", "pi", "runner", "app",
    "nobody", "default", "public", "guest", "removed", "host", "address", "cuadrilla", "worker", "coordinator",
    "data", "model", "train",
}  # fmt: skip
"""Names that say nothing of anybody, or that a report could not be read without."""

_BEGIN, _END, _DASHES = "-----BEGIN ", "-----END ", "-----"
_CODE = "[0-9a-z]"
_SPACED_INVITE = re.compile(
    rf"cuadrilla[0-9]{{1,9}}\s{{0,4}}\.(?:\s{{0,4}}[^\s]){{3,260}}?\.(?:\s{{0,4}}{_CODE}){{52}}\s{{0,4}}\."
    rf"(?:\s{{0,4}}{_CODE}){{32}}\s{{0,4}}\.(?:\s{{0,4}}{_CODE}){{7}}",
    re.IGNORECASE,
)
_INVITE = re.compile(r"cuadrilla[0-9]{1,9}\.\S*+", re.IGNORECASE)
_SECRET_NAME = (
    r"[a-z0-9_.-]{0,60}?(?:token(?!s|iz)|secret|passw(?:or)?d|passphrase|pwd|api[_-]?key|access[_-]?key|private[_-]?key"
    r"|credential|authorization|cookie|webhook(?!_file)|signature|contraseña)[a-z0-9_-]{0,60}+"
    r"|(?:[a-z0-9_.-]{0,60}?[_.-])?(?:pass|psk|auth|sig|clave)(?![a-z0-9_.-])|[a-z0-9_.-]{0,60}?[a-z0-9][_-]key(?![a-z0-9_.-])"
)
_IN_QUERY = re.compile(r"(?P<name>[?&](?:key|k|sig|auth|pass|code)=)(?P<value>[^\s&\"']++)", re.IGNORECASE)
SECRET_NAME = re.compile(_SECRET_NAME, re.IGNORECASE)
_NAMED = re.compile(
    rf"(?P<name>(?<![a-z0-9_.-])(?:{_SECRET_NAME}))(?P<sep>\\*+[\"']?\s{{0,8}}(?:[:=]|=>)\s{{0,8}})"
    r"(?P<value>\\*+\"(?:[^\"\\\n]|\\.)*+\"?|\\*+'(?:[^'\\\n]|\\.)*+'?|[^\n,;}\]]++)",
    re.IGNORECASE,
)
_HARMLESS = re.compile(r"""[\s\\"']*(?:true|false|null|none|yes|no|[<]removed>)?[\s\\"']*""", re.IGNORECASE)
_OPTION = re.compile(
    r"(?P<name>--?[a-z-]{0,40}?(?:token|pass(?:w(?:or)?d)?(?![a-z])|secret|key|bearer)(?!s)[a-z-]{0,20}+)(?P<sep>\s++|=)(?!-)(?P<value>\S++)",
    re.IGNORECASE,
)
_BEARER = re.compile(
    r"\b(?P<name>bearer|basic(?=\s+[a-z0-9+/]*[0-9=A-Z]))\s{1,8}(?P<value>[^\s\"',;]++)", re.IGNORECASE
)
_URL = re.compile(r"\b(?P<scheme>[a-z][a-z0-9+.-]{0,20}+)://(?P<rest>[^\s\"'`<>|\\^{}]++)", re.IGNORECASE)
_KNOWN_KEYS = re.compile(
    r"\b(?:hf_|gh[oprsu]_|github_pat_|glpat-|sk-|pk-|xox[a-z]-|AKIA|ASIA|tk_|eyJ|AIza|ya29\.|npm_|pypi-)[A-Za-z0-9_.-]{8,}+"
)
_UUID = re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.IGNORECASE)
_MAC = re.compile(
    r"(?<![0-9a-f:.-])(?:[0-9a-f]{2}(?:[:-][0-9a-f]{2}){5}(?:[:-][0-9a-f]{2}){0,14}|[0-9a-f]{4}(?:\.[0-9a-f]{4}){2})(?![0-9a-f:-])",
    re.IGNORECASE,
)
_BASE64_LINE = re.compile(r"(?<![A-Za-z0-9+/])[A-Za-z0-9+/]{60,}+={0,2}")
_LONG = re.compile(r"(?<![A-Za-z0-9_-])[A-Za-z0-9_-]{20,}+={0,2}")
_BY_HAND = re.compile(r"[A-Za-z]*\d*|\d+[a-z]{0,3}")
_HUMP = re.compile(r"[a-z][A-Z]")
_IPV6 = re.compile(
    r"(?<![\w:.])(?=[0-9a-f]{0,4}:[0-9a-f:])(?P<address>[0-9a-f:]{2,45}(?:(?:\d{1,3}\.){3}\d{1,3})?)(?:%[\w.-]{1,20})?(?![\w:])",
    re.IGNORECASE,
)
_IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?!\w|\.\d|-microsoft)")
_DASHED_IP = re.compile(
    r"(?<![\w.-])(?:ip-)?\d{1,3}(?:-\d{1,3}){3}(?:\.[a-z0-9-]{1,63}){1,8}+|(?<![\w.-])ip-\d{1,3}(?:-\d{1,3}){3}\b"
)
_EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]{1,64}+@[a-z0-9-]{1,63}(?:\.[a-z0-9-]{1,63}){1,8}+", re.IGNORECASE)
_PRIVATE_HOST = re.compile(
    r"(?<![\w.-])(?:[a-z0-9_-]{1,63}\.){1,8}(?:local|lan|home|internal|intranet|intra|corp|localdomain|arpa|box|ts\.net)"
    r"(?![\w-]|\.\w)",
    re.IGNORECASE,
)
_HOST_PORT = re.compile(
    r"(?<![\w./:-])(?P<host>[a-z][a-z0-9_-]{0,62}+(?:\.[a-z0-9-]{1,63}){0,8}+)(?=:[1-9]\d{3,4}(?![\w.:]))",
    re.IGNORECASE,
)
_NO_HOST = re.compile(r"\.(?:py|pyi|c|cc|cpp|cu|cuh|h|hpp|rs|toml|json|jsonl|txt|md|so)\Z", re.IGNORECASE)
_SEPARATOR = r"(?:\\{1,4}|/)"
_USERS_FOLDER = re.compile(
    rf"(?:\b[a-z]:|/mnt/[a-z])?{_SEPARATOR}(?:home|users){_SEPARATOR}"
    rf"(?:[^\\/\"'<>|:\n]{{1,64}}(?={_SEPARATOR})|[^\\/\s\"'<>|:,;)\]}}]{{1,64}})",
    re.IGNORECASE,
)


@dataclass(kw_only=True)
class Redactor:
    """`home`: the folder that becomes `~`. `user`: who is logged in. `hosts`: names of machines that are known."""

    home: str = ""
    user: str = ""
    hosts: Iterable[str] = ()
    _hosts: dict[str, str] = field(default_factory=dict)
    _addresses: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = {name for host in self.hosts for name in (host, host.partition(".")[0]) if _tells(name)}
        names = sorted(known, key=lambda name: (-len(name), name))[:MOST_NAMES]
        self._known = _words(names)
        self._user = _words([self.user] if len(self.user) > 1 and self.user.lower() not in GENERIC else [])
        home = self.home.rstrip("/\\")
        self._home = re.compile(rf"{re.escape(home)}(?![\w-])") if len(home) > 1 else None

    def redact(self, text: str, *, addresses: bool = True) -> str:
        """`addresses` False: numbers with dots are versions."""
        for _ in range(MOST_ROUNDS):
            found = self._once(text, addresses=addresses)
            if found == text:
                break
            text = found
        return text

    def redact_names(self, text: str) -> str:
        """People and machines that are known, and nothing else: for a word that is no secret and may look like one."""
        text = self._people(text)
        return self._known.sub(lambda found: self._host(found[0]), text) if self._known else text

    def redact_value(self, value: Any, *, left_out: Iterable[str] = (), _depth: int = 0) -> Any:
        """JSON: what stands under a name of a secret goes, and what stands under one of `left_out`."""
        if _depth > MOST_DEPTH:
            return REMOVED
        if isinstance(value, str):
            return self.redact(value)
        if isinstance(value, list | tuple):
            return [self.redact_value(item, left_out=left_out, _depth=_depth + 1) for item in value]
        if not isinstance(value, Mapping):
            return value
        found = {}
        for key, item in value.items():
            name = self.redact(str(key))
            hidden = SECRET_NAME.fullmatch(str(key)) and not isinstance(item, bool | None)
            if key in left_out:
                found[name] = "<left out>" if item not in ("", None) else item
            elif hidden and item not in ("", {}, []):
                found[name] = REMOVED
            else:
                found[name] = self.redact_value(item, left_out=left_out, _depth=_depth + 1)
        return found

    def _once(self, text: str, *, addresses: bool) -> str:
        text = _without_pem(text)
        text = _SPACED_INVITE.sub(REMOVED, text)
        text = _INVITE.sub(REMOVED, text)
        text = _NAMED.sub(_named, text)
        text = _IN_QUERY.sub(lambda found: f"{found['name']}{REMOVED}", text)
        text = _OPTION.sub(lambda found: f"{found['name']}{found['sep']}{REMOVED}", text)
        text = _BEARER.sub(lambda found: f"{found['name']} {REMOVED}", text)
        text = _URL.sub(self._url, text)
        for pattern in (_KNOWN_KEYS, _UUID, _MAC):
            text = pattern.sub(REMOVED, text)
        text = _BASE64_LINE.sub(_if_by_chance, text)
        text = self._people(text)
        if addresses:
            text = self._places(text)
        text = self._known.sub(lambda found: self._host(found[0]), text) if self._known else text
        return _LONG.sub(_if_by_chance, text)

    def _people(self, text: str) -> str:
        if self._home is not None:
            text = self._home.sub("~", text)
        text = _USERS_FOLDER.sub("~", text)
        text = _EMAIL.sub(REMOVED, text)
        return self._user.sub(USER, text) if self._user else text

    def _places(self, text: str) -> str:
        text = _IPV6.sub(self._address, text)
        text = _DASHED_IP.sub(lambda found: self._host(found[0]), text)
        text = _IPV4.sub(self._address, text)
        text = _PRIVATE_HOST.sub(lambda found: self._host(found[0]), text)
        return _HOST_PORT.sub(lambda found: found[0] if _NO_HOST.search(found[0]) else self._host(found[0]), text)

    def _address(self, found: re.Match[str]) -> str:
        written = found.groupdict().get("address") or found[0]
        try:
            address = ipaddress.ip_address(written)
        except ValueError:
            return found[0]
        if address.is_loopback or address.is_unspecified:
            return found[0]
        return self._addresses.setdefault(str(address), f"address-{len(self._addresses) + 1}")

    def _host(self, name: str) -> str:
        key = name.lower().rstrip(".")
        if not _tells(key):
            return name
        for form in (key, key.partition(".")[0]):
            if form in self._hosts:
                return self._hosts[form]
        return self._hosts.setdefault(key.partition(".")[0], f"host-{len(self._hosts) + 1}")

    def _url(self, found: re.Match[str]) -> str:
        """Scheme, host and port. A path may be a secret (those of webhooks are), a user's name always is."""
        scheme, rest = found["scheme"], found["rest"]
        place = re.split(r"[/?#]", rest, maxsplit=1)[0]
        more = rest[len(place) :]
        host = place.rpartition("@")[2]
        try:
            name, port = urlsplit(f"x://{host}").hostname or "", urlsplit(f"x://{host}").port
        except ValueError:
            return f"{scheme}://{REMOVED}"
        shown = self._url_host(name)
        return f"{scheme}://{shown}{f':{port}' if port else ''}{f'/{REMOVED}' if more not in ('', '/') else more}"

    def _url_host(self, name: str) -> str:
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return self._host(name) if name else REMOVED
        if address.is_loopback or address.is_unspecified:
            return f"[{name}]" if ":" in name else name
        return self._addresses.setdefault(str(address), f"address-{len(self._addresses) + 1}")


def _tells(name: str) -> bool:
    lowered = name.lower()
    generic = lowered in GENERIC or lowered in LOCAL or re.fullmatch(r"worker-\d+|\d+", lowered)
    return len(name) > 1 and not generic and not PLACEHOLDER.fullmatch(name)


def _words(names: Iterable[str]) -> re.Pattern[str] | None:
    """These as words of their own; the first of two that begin alike is the longer."""
    listed = "|".join(re.escape(name) for name in names)
    return re.compile(rf"(?<![\w-])(?:{listed})(?![\w-])", re.IGNORECASE) if listed else None


def _without_pem(text: str) -> str:
    """From BEGIN to END, or to the end of the text: an end may have been cut off."""
    parts, place = [], 0
    while (begin := text.find(_BEGIN, place)) >= 0:
        parts += [text[place:begin], REMOVED]
        end = text.find(_END, begin)
        closing = text.find(_DASHES, end + len(_END)) if end >= 0 else -1
        if closing < 0:
            return "".join(parts)
        place = closing + len(_DASHES)
    return "".join([*parts, text[place:]])


def _named(found: re.Match[str]) -> str:
    if _HARMLESS.fullmatch(found["value"]):
        return found[0]
    return f"{found['name']}{found['sep']}{REMOVED}"


def _if_by_chance(found: re.Match[str]) -> str:
    """A word that no person has written: a long piece of letters and digits, or capitals and small letters at random.

    Words between hyphens (WSL2, cu13, v00000012) and names of classes are names of something.
    """
    word = found[0]
    pieces = re.split(r"[_-]+", word.rstrip("="))
    if any(len(piece) >= 20 and _mixes(piece) for piece in pieces):
        return REMOVED
    if len(word) < 20 or word.islower() or word.isupper():
        return word
    by_hand = all(_BY_HAND.fullmatch(piece) for piece in pieces)
    hump = 6 if len(word) < 30 else 10
    return word if by_hand and len(word) > hump * len(_HUMP.findall(word)) else REMOVED


def _mixes(piece: str) -> bool:
    return any(map(str.isdigit, piece)) and any(map(str.isalpha, piece))
