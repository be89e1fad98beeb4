"""The service with real clients: OpenAI's library, curl, an evaluation harness, and requests of a browser."""

import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import Request, urlopen

import numpy as np
import openai
import pytest
import torch

from cuadrilla.model.generate import generate
from cuadrilla.model.hf import save_hf
from cuadrilla.model.sampling import Sampling
from cuadrilla.train.trained import LanguageModel, open_model
from tests.commands import run_program
from tests.inside import cuadrilla
from tests.models import trained_language_run
from tests.serving import Service, serving
from tests.spawn.test_examples import copy_examples

KEY = "correct-horse-battery-staple"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_language_run(tmp_path_factory.mktemp("served")).path


@pytest.fixture(scope="module")
def model(run: Path) -> LanguageModel:
    return open_model(run, device="cpu")


@pytest.fixture(scope="module")
def service(run: Path) -> Iterator[Service]:
    with serving(run, "--slots", 8, "--queue", 64, key=KEY) as found:
        yield found


@pytest.fixture
def client(service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


def greedy(model: LanguageModel, prompt: str, *, tokens: int) -> str:
    ids = model.tokenizer.encode(prompt)
    sampling = Sampling(temperature=0, max_tokens=tokens, stop_ids=(model.tokenizer.end_of_text,))
    return model.tokenizer.decode(list(generate(model.ready, ids, sampling=sampling)))


def test_completions_of_openais_library(client: openai.OpenAI, model: LanguageModel) -> None:
    expected = greedy(model, "Había una vez", tokens=12)
    whole = client.completions.create(model="run", prompt="Había una vez", max_tokens=12, temperature=0)
    assert whole.choices[0].text == expected
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    pieces = client.completions.create(
        model="run", prompt="Había una vez", max_tokens=12, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(pieces)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == expected
    assert chunks[-1].usage == whole.usage


def test_several_prompts_and_choices(client: openai.OpenAI, model: LanguageModel) -> None:
    found = client.completions.create(model="run", prompt=["Había", "El"], n=3, max_tokens=6, seed=5, temperature=0.9)
    assert [choice.index for choice in found.choices] == list(range(6))
    alone = client.completions.create(model="run", prompt="El", max_tokens=6, seed=7, temperature=0.9)
    assert found.choices[5].text == alone.choices[0].text  # its third one has the seed 5 + 2
    ids = model.tokenizer.encode("El")
    as_ids = client.completions.create(model="run", prompt=ids, max_tokens=6, seed=7, temperature=0.9)
    assert as_ids.choices[0].text == alone.choices[0].text


def test_stop_strings_and_echo(client: openai.OpenAI, model: LanguageModel) -> None:
    text = greedy(model, "Había una vez", tokens=40)
    stop = text[10:14]
    found = client.completions.create(
        model="run", prompt="Había una vez", max_tokens=40, temperature=0, stop=[stop], echo=True
    )
    assert found.choices[0].text == "Había una vez" + text[: text.index(stop)]
    assert found.choices[0].finish_reason == "stop"


def test_chat_is_flattened(client: openai.OpenAI, model: LanguageModel) -> None:
    messages = [{"role": "system", "content": "Cuentos."}, {"role": "user", "content": "Había una vez"}]
    expected = greedy(model, "Cuentos.\n\nHabía una vez", tokens=8)
    whole = client.chat.completions.create(
        model="run", messages=messages, max_tokens=8, temperature=0, logprobs=True, top_logprobs=2
    )  # type: ignore[call-overload]
    assert whole.choices[0].message.content == expected
    content = whole.choices[0].logprobs.content
    assert b"".join(bytes(token.bytes) for token in content).decode(errors="replace") == expected
    assert all(token.top_logprobs[0].logprob == token.logprob for token in content)  # greedy: the best one
    pieces = client.chat.completions.create(model="run", messages=messages, max_tokens=8, temperature=0, stream=True)  # type: ignore[call-overload]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == expected


def test_what_clients_ask_beside_completions(service: Service, client: openai.OpenAI) -> None:
    assert [found.id for found in client.models.list()] == ["run"]
    assert client.models.retrieve("run").id == "run"
    assert service.ask("/healthz") == service.ask("/health") == (200, {"status": "ok"})
    asks = {"Origin": "http://localhost:3000", "Access-Control-Request-Method": "POST"}  # an app's page in a browser
    asks["Access-Control-Request-Headers"] = "authorization,content-type"
    with urlopen(Request(f"{service.url}/v1/completions", headers=asks, method="OPTIONS")) as answer:
        assert answer.headers["access-control-allow-origin"] == "*"
    nothing = {"model": "run", "prompt": "Señor", "max_tokens": 0}
    assert service.ask("/v1/completions", nothing)[0] == 200
    _, text = service.ask("/metrics")
    assert "nan" not in text.lower()
    assert 'cuadrilla_slots{model="run"} 8.0' in text


def test_errors_of_openais_library(client: openai.OpenAI, service: Service) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no such model"):
        client.completions.create(model="gpt-4", prompt="x")
    with pytest.raises(openai.BadRequestError, match="the model reads 256"):
        client.completions.create(model="run", prompt="x" * 5000)
    with pytest.raises(openai.BadRequestError, match="prompt: Input should be a valid string"):
        client.completions.create(model="run", prompt=[-1])
    with (
        openai.OpenAI(base_url=f"{service.url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


@pytest.mark.thorough
def test_an_evaluation_harness(service: Service, model: LanguageModel, tmp_path: Path) -> None:
    """lm-evaluation-harness gets the same scores of choices over the API as from our model."""
    save_hf(model.model, tmp_path / "run-hf", tokenizer=model.tokenizer)
    questions = [
        {"context": "Había una vez un", "choices": [" niño", " xq#"], "answer": 0},
        {"context": "La niña vivía en la", "choices": [" casa", " montaña"], "answer": 1},
    ]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    (tmp_path / "cuentos.yaml").write_text(
        "task: cuentos\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path / 'questions.jsonl'}}}}}\n"
        "output_type: multiple_choice\ntest_split: test\ndoc_to_text: '{{context}}'\ndoc_to_choice: '{{choices}}'\n"
        "doc_to_target: answer\ntarget_delimiter: ''\nmetric_list: [{metric: acc}]\n"
    )
    run_program(
        sys.executable, "-m", "lm_eval", "--model", "local-completions", "--tasks", "cuentos",
        "--include_path", tmp_path, "--output_path", tmp_path / "out", "--log_samples",
        "--model_args", f"model=run,tokenizer={tmp_path / 'run-hf'},base_url={service.url}/v1/completions,"
        f"auth_token={KEY},max_length=256",
        env={**os.environ, "OPENAI_API_KEY": KEY, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}, seconds=250,
    )  # fmt: skip
    (samples,) = (tmp_path / "out").rglob("samples_cuentos_*.jsonl")
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        found = [float(response[0][0]) for response in sample["resps"]]
        context, choices = sample["doc"]["context"], sample["doc"]["choices"]
        assert found == pytest.approx([log_probability(model, context, choice) for choice in choices], abs=1e-3)


def log_probability(model: LanguageModel, context: str, choice: str) -> float:
    """The log probability of the choice after the context, summed over its tokens."""
    before, after = model.tokenizer.encode(context), model.tokenizer.encode(choice)
    with torch.no_grad():
        logprobs = torch.log_softmax(model.model(torch.tensor([before + after]))[0].float(), -1)
    return sum(float(logprobs[len(before) - 1 + place, token]) for place, token in enumerate(after))


# -- users' tasks ----------------------------------------------------------------------------------------------------


def test_the_mlp_predicts(tmp_path: Path) -> None:
    """The predictions are those of the model alone. Inputs that do not fit the schema are refused by name."""
    run_file = copy_examples(tmp_path / "mlp") / "mlp.toml"
    cuadrilla("train", run_file, "--set", "train.epochs=0.2", code=0)
    inputs = np.random.default_rng(3).standard_normal((50, 20)).round(3).tolist()
    with serving(run_file.parent) as service:
        status, whole = service.ask("/v1/predict", {"inputs": inputs})
        assert status == 200
        assert whole["model"] == "mlp"
        with ThreadPoolExecutor(8) as pool:
            one_by_one = list(pool.map(lambda one: service.ask("/v1/predict", {"inputs": [one]})[1], inputs))
        assert [answer["outputs"][0] for answer in one_by_one] == pytest.approx(whole["outputs"], abs=1e-5)
        status, refused = service.ask("/v1/predict", {"inputs": [inputs[0][:19]]})
        assert (status, refused["error"]["message"].partition(":")[0]) == (400, "inputs.0")
        status, (schema,) = service.ask("/v1/predict")
        assert (status, schema["inputs"]["items"]["minItems"]) == (200, 20)
        assert service.ask("/v1/completions", {"prompt": "x"})[0] == 404
        assert [model["id"] for model in service.ask("/v1/models")[1]["data"]] == ["mlp"]
        assert service.stop() == 0
