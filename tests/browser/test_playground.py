"""The playground in a real browser: a person types, watches and stops. No text of a service becomes HTML.

Models are real and tiny. Texts that they would never generate come from a fake service with the same page.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import pytest
import torch
from pydantic import BaseModel, Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from torch import nn

from cuadrilla.data.tokenizer import Tokenizer
from cuadrilla.model.generate import generate_text
from cuadrilla.model.gpt2 import GPT2, GPT2Config
from cuadrilla.model.rows import Rows
from cuadrilla.model.sampling import Sampling
from cuadrilla.serve.app import make_app
from cuadrilla.serve.batching import Batcher
from cuadrilla.serve.edge import Edge
from cuadrilla.serve.page import headers, page
from cuadrilla.serve.predictions import Predictor
from cuadrilla.serve.served import ServedModel
from cuadrilla.train.precision import choose_precision
from cuadrilla.train.trained import LanguageModel
from tests.chromium import CONTROL, Tab
from tests.commands import wait_for
from tests.loopback import listening
from tests.serving import predictor

CPU = torch.device("cpu")
TEXT = "Había una vez un niño que vivía cerca del mar y tenía un barco de vela muy pequeño. "
CONTEXT = 30_000  # so many tokens that no test waits for their end
PROMPT = "Había una vez"
HOSTILE = "<script>window.owned = 1</script><img src=x onerror='window.owned = 1'>&lt;b&gt;"


def language_model(tokenizer: Tokenizer) -> LanguageModel:
    """An untrained model that generates only whole words of ASCII: the embedding's rows of other tokens are 0."""
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=tokenizer.vocab_size, context=CONTEXT, layers=1, heads=2, width=16)
    model = GPT2(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
        for token in range(tokenizer.vocab_size):
            word = tokenizer.decode([token])
            if not (len(word) > 1 and word.isascii() and word.strip().isalpha()):
                model.transformer.wte.weight[token] = 0
    precision = choose_precision("fp32", device=CPU)
    path = Path("tokenizer.json")  # not read
    return LanguageModel(model=model, tokenizer=tokenizer, tokenizer_path=path, device=CPU, precision=precision)


@contextmanager
def listening_service(model: ServedModel | Predictor) -> Iterator[str]:
    with listening(Edge(make_app(model), key=""), around=model.running()) as url:
        yield url


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return language_model(Tokenizer.train([TEXT] * 20, vocab_size=340))


@pytest.fixture(scope="module")
def served(model: LanguageModel) -> ServedModel:
    return ServedModel(name="uno", opened=model, batcher=Batcher(Rows(model.ready, slots=2), max_waiting=2))


@pytest.fixture(scope="module")
def url(served: ServedModel) -> Iterator[str]:
    with listening_service(served) as found:
        yield found


def greedy(model: LanguageModel, prompt: str, *, tokens: int) -> str:
    sampling = Sampling(temperature=0, max_tokens=tokens)
    return "".join(generate_text(model.model, model.tokenizer, prompt, sampling=sampling))


def put(tab: Tab, **values: object) -> None:
    """Set values of the settings."""
    for name, value in values.items():
        tab.value(f"void (document.querySelector('[name={name}]').value = {json.dumps(str(value))})")


def write(tab: Tab, prompt: str, **values: object) -> None:
    tab.click("#prompt")
    tab.value("document.querySelector('#prompt').select()")
    tab.type(prompt)
    put(tab, **values)


def ended(tab: Tab) -> str:
    """Wait until the text has ended; the words with which the page says so."""
    found: str = tab.until(
        "(() => { const texts = document.querySelector('#texts');"
        "return texts.querySelector('.out').ariaBusy === 'false' &&"
        " (texts.querySelector('.error').innerText || texts.querySelector('.state').innerText); })()"
    )
    return found


def output(tab: Tab) -> str:
    found: str = tab.value("document.querySelector('.out').textContent")
    return found


def test_a_person_types_and_reads_on(tab: Tab, url: str, model: LanguageModel) -> None:
    tab.open(url)
    assert tab.text("#texts h2") == "uno"
    write(tab, PROMPT, max_tokens=20, temperature=0, seed=7)
    tab.press("Enter", modifiers=CONTROL)
    assert "(length)" in ended(tab)
    expected = greedy(model, PROMPT, tokens=20)
    assert output(tab) == expected
    assert tab.text("#texts .seed") == "seed 7"
    assert "20 tokens" in tab.text(".count")
    assert "tokens/s" in tab.text(".speed")
    tab.click(".more")  # continues from the whole text
    assert "(length)" in ended(tab)
    assert tab.value("document.querySelector('#prompt').value") == PROMPT + expected
    assert output(tab) == greedy(model, PROMPT + expected, tokens=20)
    write(tab, "un barco\nde vela\n", stop="zzz", max_tokens=5)
    tab.click("#go")
    ended(tab)
    assert output(tab) == greedy(model, "un barco\nde vela\n", tokens=5)


def test_escape_stops_and_the_slot_is_free(tab: Tab, url: str, served: ServedModel) -> None:
    tab.open(url)
    write(tab, PROMPT, max_tokens=CONTEXT - 10, temperature=0)
    tab.click("#go")
    tab.until("document.querySelectorAll('.piece').length > 20")
    assert served.batcher.busy_slots == 1
    assert tab.text("#go") == "Stop"
    tab.press("Escape")
    assert ended(tab) == "Stopped by you."
    wait_for(lambda: served.batcher.busy_slots == 0)
    assert len(output(tab)) > 20
    tab.click("#go")  # once more, and by the button
    tab.until("document.querySelectorAll('.piece').length > 20")
    tab.click("#go")
    assert ended(tab) == "Stopped by you."
    wait_for(lambda: served.batcher.busy_slots == 0)


def test_what_else_was_likely(tab: Tab, url: str) -> None:
    tab.open(url)
    write(tab, PROMPT, max_tokens=8, temperature=0)
    tab.click("[name=logprobs]")
    tab.click("#go")
    ended(tab)
    pieces = tab.value("[...document.querySelectorAll('.piece')].map((one) => one.textContent)")
    assert len(pieces) == 8
    tab.click(".piece:nth-child(4)")
    tab.until("!document.querySelector('#card').hidden")
    likely = tab.value("[...document.querySelectorAll('#card div span')].map((one) => parseFloat(one.textContent))")
    assert len(likely) == 5
    assert likely == sorted(likely, reverse=True)
    names = tab.value("[...document.querySelectorAll('#card code')].map((one) => one.textContent.replace('␣', ' '))")
    assert names[0] == pieces[3]  # greedy
    tab.click("#card div button:nth-child(2)")
    ended(tab)
    begun = PROMPT + "".join(pieces[:3])
    assert tab.value("document.querySelector('#prompt').value") == begun + names[1]
    # By the keys alone: to the third piece, into its card, and away again.
    tab.value("document.querySelector('.out').focus()")
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "ArrowRight", "Enter"):
        tab.press(key)
    assert tab.value("document.activeElement.closest('#card') !== null")
    assert tab.value("[...document.querySelectorAll('.piece')].findIndex((one) => one.matches('.chosen'))") == 1
    tab.press("Escape")
    assert tab.value("document.querySelector('#card').hidden && document.activeElement.matches('.out')")
    third = tab.value("[...document.querySelectorAll('.piece')].slice(0, 2).map((one) => one.textContent).join('')")
    tab.click(".piece:nth-child(3)")
    tab.click("#again")
    ended(tab)
    assert tab.value("document.querySelector('#prompt').value") == begun + names[1] + third


async def hostile(_: Request) -> Response:
    """A completion whose text and likely tokens contain HTML."""
    top = {HOSTILE: -0.1, "<img src=x onerror='owned = 1'>": -3}
    parts = [chunk("una "), chunk(HOSTILE, reason="stop", top=top), b"data: [DONE]\n\n"]
    return Response(b"".join(parts), media_type="text/event-stream")


def chunk(text: str, *, reason: str | None = None, top: dict[str, float] | None = None) -> bytes:
    logprobs = top and {"tokens": [text], "token_logprobs": [-1.0], "top_logprobs": [top], "text_offset": [0]}
    choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reason}
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


@pytest.fixture(scope="module")
def strange() -> Iterator[str]:
    """The URL of a fake service, which sends hostile texts; below it the page of a task, /task."""

    async def show(request: Request) -> Response:
        task = {"inputs": {"description": HOSTILE, "type": HOSTILE}, "outputs": None}
        text, policy = page(HOSTILE, task if request.url.path == "/task" else None, languages="en")
        return HTMLResponse(text, headers=headers(policy))

    pages = [Route(path, show) for path in ("/", "/task")]
    app = Starlette(routes=[*pages, Route("/v1/completions", hostile, methods=["POST"])])
    with listening(Edge(app, key="")) as url:
        yield url


def test_nothing_that_comes_in_becomes_html(tab: Tab, strange: str) -> None:
    tab.open(strange)
    assert tab.text("#texts h2") == HOSTILE
    elements = tab.value("document.querySelectorAll('script, img').length")
    write(tab, "hostile")
    tab.click("#go")
    assert "(stop)" in ended(tab)
    assert output(tab) == "una " + HOSTILE
    tab.click(".piece:nth-child(2)")
    assert tab.text("#card code") == HOSTILE.replace(" ", "␣")
    tab.press("Escape")
    tab.click(".edit")
    assert tab.value("document.querySelector('#texts .prompt').textContent") == "hostileuna " + HOSTILE
    assert tab.value("document.querySelectorAll('script, img').length") == elements
    assert tab.value("window.owned") is None
    tab.open(strange + "/task")
    assert tab.text("#task h2") == HOSTILE
    assert HOSTILE in tab.text("#takes")
    assert tab.value("document.querySelectorAll('script, img').length") == elements
    assert tab.value("window.owned") is None


class Point(BaseModel):
    x: Annotated[float, Field(ge=-1, le=1)]
    tags: list[str] = []


class Sums:
    """A user's task, with only the method that the tests call."""

    def predict(self, model: nn.Module, inputs: list[Point]) -> list[float]:
        found: list[float] = model(torch.tensor([[point.x] for point in inputs])).sum(1).tolist()
        return found


def test_a_service_of_a_task(tab: Tab) -> None:
    with listening_service(predictor(Sums())) as url:
        tab.open(url)
        tab.until("!document.querySelector('#task').hidden")
        assert tab.value("document.querySelector('#texts').hidden")
        assert '"maximum": 1' in tab.text("#takes")
        for typed, told in (
            ("[{", "This is not JSON"),
            ('[{"x": 7}]', "The service has answered with an error (400)."),
            ('[{"x": 0.5}, {"x": -0.25}]', ""),
        ):
            tab.click("#inputs")
            tab.value("document.querySelector('#inputs').select()")
            tab.type(typed)
            tab.press("Enter", modifiers=CONTROL)
            tab.until("!document.querySelector('#predict').disabled")
            assert tab.text("#unpredicted").startswith(told)
        assert json.loads(tab.text("#outputs")) == [0.5, -0.25]
        assert "Answered in" in tab.text("#predicted")
