"""Ray Serve around an exported model: Ray places the replicas, reserves cards and starts a dead one again.

    cuadrilla export hf mi-gpt2 --to mi-gpt2-hf
    pip install "cuadrilla[ray,hf]" && python ray_serve.py mi-gpt2-hf [--replicas 2] [--gpus 1]
    curl -s http://127.0.0.1:8000/ -d '{"prompt": "Había una vez"}'

The cluster is the one that you started (`ray start --head`, and `ray start --address HEAD:6379` on each machine) or
processes of this machine; the folder must be at the same path everywhere. Ports that Ray Serve opens, beside those of
Ray: 8000 on the loopback of each machine with a replica, without a key (`http_options` below), and for each replica a
gRPC port on all addresses of its machine, which no setting closes: only for a network where nobody else is. A request
in hand of a replica that dies is lost. `cuadrilla serve` on each machine with nginx in front has neither problem.
"""

import argparse
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "token")  # Ray reads it when it is imported; `ray get-auth-token --generate`

import ray
from ray import serve
from starlette.requests import Request


@serve.deployment(max_ongoing_requests=8)
class Generator:
    def __init__(self, folder: str) -> None:
        from transformers import pipeline

        self._generate = pipeline("text-generation", model=folder, tokenizer=folder)

    async def __call__(self, request: Request) -> dict[str, Any]:
        asked = await request.json()
        tokens = min(int(asked.get("max_tokens", 16)), 256)
        (found,) = self._generate(asked["prompt"], max_new_tokens=tokens, return_full_text=False)
        return {"text": found["generated_text"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--gpus", type=float, default=0, help="cards of each replica")
    arguments = parser.parse_args()
    ray.init()
    serve.start(http_options={"host": "127.0.0.1", "port": 8000})
    options = {"num_replicas": arguments.replicas, "ray_actor_options": {"num_cpus": 1, "num_gpus": arguments.gpus}}
    serve.run(Generator.options(**options).bind(str(arguments.folder.resolve())), name="cuadrilla", blocking=True)


if __name__ == "__main__":
    main()
