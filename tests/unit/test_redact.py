"""Nothing secret survives, wherever it stands; done twice it is done once; what is needed stays readable."""

import random
import string
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuadrilla.link.address import Address
from cuadrilla.link.invite import Invite
from cuadrilla.monitor.redact import REMOVED, Redactor

HOME, ME, HERE, OTHER = "/home/ana.lopez", "ana.lopez", "taller-ana", "portatil-eva"
URLSAFE, HEX = string.ascii_letters + string.digits + "-_", "0123456789abcdef"
Planted = tuple[str, list[str]]
"""A text as it may stand in a log, and what of it must not be read any more."""
PEM = "-----BEGIN {kind}-----{end}{body}{end}-----END {kind}-----"


def redactor() -> Redactor:
    return Redactor(home=HOME, user=ME, hosts=[f"{HERE}.lan", OTHER, "worker-1", "localhost", "root"])


def word(source: random.Random, letters: str, length: int) -> str:
    """As `secrets` makes them, with at least one digit: some in a thousand have none, and look like a name then."""
    return "".join(source.choices(letters, k=length - 2)) + source.choice("23456789") + source.choice(letters[:6])


def an_invite(source: random.Random) -> str:
    host = source.choice(["192.168.1.50", "[fd00::5]", "pc.lan", "10.0.0.7"])
    invite = Invite(address=Address.parse(f"{host}:47470"), key_hash=source.randbytes(32), secret=source.randbytes(20))
    return source.choice([str.lower, str.upper])(str(invite))


def a_pem(source: random.Random) -> str:
    letters = string.ascii_letters + string.digits + "+/"
    end = source.choice(["\n", "\\n", "\r\n"])
    body = end.join("".join(source.choices(letters, k=64)) for _ in range(4))
    return PEM.format(kind=source.choice(["PRIVATE KEY", "CERTIFICATE", "RSA PRIVATE KEY"]), body=body, end=end)


def short(source: random.Random) -> str:
    return word(source, string.ascii_letters + string.digits, 8)


def an_invite_in_pieces(source: random.Random) -> Planted:
    text = an_invite(source)
    return text.replace(".", ". ").replace(text[-20:], " ".join(text[-20:])), text.split(".")[-3:-2]


def a_bearer(source: random.Random) -> Planted:
    secret = short(source)
    return f"{source.choice(['Authorization: Bearer', 'bearer', 'authorization: basic'])} {secret}", [secret]


def a_named_one(source: random.Random) -> Planted:
    secret = short(source)
    name = source.choice(
        [
            "RAY_AUTH_TOKEN",
            "hf_token",
            "api_key",
            "API-Key",
            "password",
            "db.passwd",
            "secret",
            "DB_PASS",
            "pass",
            "OPENAI_KEY",
            "ssh-key",
            "auth",
            "x-auth",
            "PSK",
            "sig",
            "clave",
            "contraseña",
        ]
    )
    form = source.choice(["{}={}", "{}: {}", '"{}": "{}"', "'{}' : '{}'", '\\"{}\\": \\"{}\\"', '{} => "{} x"'])
    return form.format(name, secret), [secret]


def an_option(source: random.Random) -> Planted:
    secret = short(source)
    return f"--{source.choice(['token', 'api-key', 'hf-token', 'password', 'pass'])} {secret}", [secret]


def a_query(source: random.Random) -> Planted:
    secret = short(source)
    return f"GET /v1/models?page=2&key={secret} HTTP/1.1", [secret]


def a_url(source: random.Random) -> Planted:
    secret, token = short(source), word(source, URLSAFE, 20)
    return f"https://ana:{secret}@db.example.com:8080/{token}?q={secret}", [secret, token, "db.example"]


def a_known_one(source: random.Random) -> Planted:
    text = source.choice(["hf_", "sk-", "ghp_", "github_pat_", "xoxb-"]) + short(source) + short(source)
    return text, [text]


def an_ipv4(source: random.Random) -> Planted:
    text = ".".join(str(byte % 254 + 1) for byte in (9, *source.randbytes(3)))
    return source.choice(["{}", "{}:47470", "{}/24"]).format(text), [text]


def an_ipv6(source: random.Random) -> Planted:
    text = ":".join(f"{source.randrange(4096, 65536):x}" for _ in range(8))
    return source.choice(["{}", "[{}]:47470", "{}%eth0"]).format(text), [text]


def itself(make: Callable[[random.Random], str], part: slice = slice(None)) -> Callable[[random.Random], Planted]:
    def planted(source: random.Random) -> Planted:
        text = make(source)
        return text, [text[part]]

    return planted


def one_of(*texts: str) -> Callable[[random.Random], Planted]:
    return lambda source: (source.choice(texts), [])


def the_end_of_a_pem(source: random.Random) -> str:
    return a_pem(source).replace("\\n", "\n").replace("\r", "").split("\n", 1)[1]


PLANTED: dict[str, Callable[[random.Random], Planted]] = {
    "invite": lambda source: (text := an_invite(source), text.split(".")[-3:]),
    "invite in pieces": an_invite_in_pieces,
    "pem": itself(a_pem, slice(60, 90)),
    "half a pem": itself(lambda source: a_pem(source)[:120], slice(60, 90)),
    "the end of a pem": itself(the_end_of_a_pem, slice(0, 30)),
    "ray token": itself(lambda source: word(source, HEX, 64)),
    "token": itself(lambda source: word(source, URLSAFE, 43)),
    "bearer": a_bearer,
    "named": a_named_one,
    "option": an_option,
    "url": a_url,
    "query": a_query,
    "known": a_known_one,
    "mac": itself(lambda source: source.choice(":-").join(f"{byte:02x}" for byte in source.randbytes(6))),
    "ipv4": an_ipv4,
    "ipv6": an_ipv6,
    "host": one_of(HERE, OTHER, f"{HERE}.lan", OTHER.upper(), "nas.local", "db-7:5432", "ip-10-1-2-3"),
    "path": one_of(f"{HOME}/x", "/home/eva/x", "/Users/eva/x", "C:\\Users\\Eva Luz\\x", "/mnt/c/Users/eva"),
    "user": one_of(ME, f"{ME}@{HERE}", f"{ME}@example.org"),
}
KINDS = list(PLANTED)
NEVER = [HOME, ME, HERE, OTHER, "eva", "Eva", "Luz", "nas.", "db-7", "ana:", "ip-10"]
AROUND = [" ", "\n", '"', "'", "(", ") ", "[", "] ", ", ", "; ", "=", "\t", " loss 3.2 ", "\nthe end\n"]
around = st.sampled_from(AROUND)


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 2**32), before=around, after=around)
@settings(max_examples=60, deadline=None)
def test_planted_secrets_never_survive(kind: str, seed: int, before: str, after: str) -> None:
    text, hidden = PLANTED[kind](random.Random(seed))
    found = redactor().redact(f"step 7{before}{text}{after}step 8")
    for secret in [*hidden, *NEVER]:
        assert secret not in found, (secret, found)
    assert "step 7" in found


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 2**32), around), max_size=6), st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_done_twice_it_is_done_once(parts: list[tuple[str, int, str]], text: str) -> None:
    one = redactor()
    mixed = "".join(PLANTED[kind](random.Random(seed))[0] + between for kind, seed, between in parts) + text
    found = one.redact(mixed)
    assert one.redact(found) == found
    assert redactor().redact(found) == found


@given(st.text(alphabet="-:=.@/\\\"' \nabcdef0123456789tokenBEGINcuadrilla1", max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_text(text: str) -> None:
    one = redactor()
    found = one.redact(text)
    assert one.redact(found) == found


def test_placeholders_are_stable() -> None:
    one = redactor()
    first = one.redact(f"{OTHER}:47470 (192.168.1.7) left; {OTHER}/cuda:0 at 192.168.1.8")
    assert first == "host-1:47470 (address-1) left; host-1/cuda:0 at address-2"
    assert (
        one.redact(f"again {OTHER.upper()} at 192.168.1.8 and 192.168.1.7") == "again host-1 at address-2 and address-1"
    )


READABLE = [
    "2026-11-25 04:12:17,123 INFO coordinator | cuadrilla.train.coordinate: worker-1 is late with its lease",
    "tokens 8192, tokens_per_second=1234.5, train.tokens = 0, engine.ray_without_token: false, tokenizer.json",
    "5.15.153.1-microsoft-standard-WSL2, torch 2.13.0+cu130, CUDA 13.0, driver 580.65.06, Python 3.12.3",
    'File "x/site-packages/torch/nn/modules/module.py", line 1775, in _wrapped_call_impl',
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 3.81 GiB total)",
    "train.pass_sequences = 8, passes: 3, pass 2 of 4, bypass: 1, compass: 90, key: v00000012, author: y",
    "localhost:47470, 127.0.0.1:8000, [::1]:8000, http://127.0.0.1:8000",
    "std::vector<float>, 12:34:56, loss.py:1234, checkpoints/v00000012, CoordinatorRuntime, nvmlDeviceGetCount_v2",
    '{"event": "left", "worker": "worker-1", "reason": "the connection ended", "time": 1764043937.25}',
]


@pytest.mark.parametrize("text", READABLE)
def test_what_is_needed_stays(text: str) -> None:
    assert redactor().redact(text) == text


def test_values() -> None:
    value = {
        "token": "x",
        "Authorization": ["a", "b"],
        "sample": "once upon a time",
        "engine": {"ray_without_token": False, "listen": "192.168.1.7:47470", OTHER: 0.5, "tokens": 12},
        "password": 1234,
        "list": [f"by {ME}", None, 1.5],
    }
    assert redactor().redact_value(value, left_out=("sample",)) == {
        "token": REMOVED,
        "Authorization": REMOVED,
        "sample": "<left out>",
        "engine": {"ray_without_token": False, "listen": "address-1:47470", "host-1": 0.5, "tokens": 12},
        "password": REMOVED,
        "list": ["by <user>", None, 1.5],
    }
    deep: object = "x"
    for _ in range(50):
        deep = [deep]
    assert REMOVED in str(redactor().redact_value(deep))


HOSTILE = [
    "a", "-----BEGIN ", "token", "::", "cuadrilla1.", "cuadrilla1 .", "1.", "a@", "a-", "/home/", "http://", "token=",
    "\\", "token\\", '"', 'token:"', "aa:", "--key ", " ", "bearer ", "basic ", "secret-", "A1b", "x:", "a1.",
]  # fmt: skip


@pytest.mark.parametrize("piece", HOSTILE)
def test_the_time_grows_with_the_text_only(piece: str) -> None:
    """Ends at all: what tries again what it has consumed would need years for this."""
    found = redactor().redact(piece * (200_000 // len(piece)))
    assert len(found) <= 2_000_000
