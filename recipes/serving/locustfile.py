"""Clients that each wait for their answer, for locust: completions as streams, or a task's predictions.

    pip install locust
    locust -f locustfile.py Completions --headless -u 4 -t 60s -H http://127.0.0.1:8000
    locust -f locustfile.py Predictions --inputs inputs.json --headless -u 16 -t 60s -H http://127.0.0.1:8000

`inputs.json`: a list of inputs as the task takes them; each call sends one of them. Without --headless a page on
http://localhost:8089 shows the same. Prompts are random tokens, so that no prompt is known from an earlier one.
"""

import json
import random
import time
from pathlib import Path
from typing import Any

from locust import HttpUser, events, task

PROMPT_TOKENS, NEW_TOKENS = 64, 32


@events.init_command_line_parser.add_listener
def add_options(parser: Any) -> None:
    parser.add_argument("--inputs", type=Path, default="inputs.json", help="JSON, for Predictions")
    parser.add_argument("--api-key-file", type=Path, help="the service's key")


class Caller(HttpUser):
    abstract = True

    def on_start(self) -> None:
        options = self.environment.parsed_options
        if options.api_key_file:
            self.client.headers["Authorization"] = f"Bearer {options.api_key_file.read_text().strip()}"


class Completions(Caller):
    @task
    def complete(self) -> None:
        prompt = [random.randrange(1, 256) for _ in range(PROMPT_TOKENS)]
        asked = {"prompt": prompt, "max_tokens": NEW_TOKENS, "ignore_eos": True, "stream": True}
        began, reason = time.perf_counter(), None
        with self.client.post(
            "/v1/completions", json=asked, stream=True, catch_response=True, name="first token"
        ) as answer:
            for line in answer.iter_lines():
                if line.startswith(b"data: {"):
                    reason = json.loads(line[6:])["choices"][0]["finish_reason"]
            if reason != "length":
                answer.failure(f"status {answer.status_code}, finish_reason {reason}")
        if reason == "length":
            milliseconds = 1000 * (time.perf_counter() - began)
            events.request.fire(
                request_type="POST", name="whole answer", response_time=milliseconds, response_length=0, exception=None
            )


class Predictions(Caller):
    def on_start(self) -> None:
        super().on_start()
        self.inputs = json.loads(self.environment.parsed_options.inputs.read_text())

    @task
    def predict(self) -> None:
        self.client.post("/v1/predict", json={"inputs": [random.choice(self.inputs)]})
