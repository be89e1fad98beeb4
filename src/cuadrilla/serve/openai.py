"""What callers may ask for, as OpenAI's API has it: the fields that are honoured, with their bounds.

A field that is not here is ignored, as other servers do: clients send fields of their own. A known one that is wrong,
or cannot be honoured, is refused by name. `top_k` and `ignore_eos` are additions that other servers have, too.
"""

import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictStr

from cuadrilla.model.sampling import Sampling
from cuadrilla.serve.edge import Refusal

MOST_CHOICES, MOST_STOPS, MOST_STOP_LETTERS, MOST_TOP = 64, 16, 256, 20
MOST_TOKENS = 2**20


def _unicode(text: str) -> str:
    """Raises ValueError for half of a character, which JSON can write and nothing can encode."""
    text.encode()
    return text


Text = Annotated[StrictStr, AfterValidator(_unicode)]
Token = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(fail_fast=True)]
"""The first error of a list is enough: a million of them take seconds to tell."""
Texts = Annotated[list[Text], Field(fail_fast=True)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Stop = Text | Texts | None
NotHonoured = Annotated[Any, Field(exclude=True)]


class Asked(BaseModel):
    """What completions of both kinds have in common."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    model: Text | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, Field(strict=True, ge=-1, le=2**31)] | None = Field(None, description="0 or -1: all tokens")
    n: Annotated[int, Field(strict=True, ge=1, le=MOST_CHOICES)] | None = None
    seed: Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)] | None = None
    stop: Stop = None
    stream: bool | None = None
    stream_options: "StreamOptions | None" = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    user: Text | None = None
    ignore_eos: bool | None = Field(None, description="go on behind the end-of-text token, for load tests")
    logit_bias: NotHonoured = None
    metadata: NotHonoured = None

    def sampling(self, *, max_tokens: int, end_of_text: int) -> Sampling:
        """Raises Refusal for stop strings that are empty or too many."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stop) > MOST_STOPS or not all(0 < len(text) <= MOST_STOP_LETTERS for text in stop):
            raise Refusal(
                422, f"stop has at most {MOST_STOPS} texts of 1 to {MOST_STOP_LETTERS} characters", param="stop"
            )
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(self.top_k or 0, 0),
            top_p=1.0 if self.top_p is None else self.top_p,
            max_tokens=max_tokens,
            stop=tuple(stop),
            stop_ids=() if self.ignore_eos else (end_of_text,),
            seed=secrets.randbits(48) if self.seed is None else self.seed,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
        )

    def refuse_unhonoured(self, *names: str) -> None:
        """Raises Refusal if one of these fields, or of those of both kinds, asks for something."""
        for name in ("logit_bias", *names):
            if getattr(self, name):
                raise Refusal(422, f"{name} is not supported here", param=name, code="unsupported_parameter")


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    include_usage: bool = False


class CompletionRequest(Asked):
    prompt: Text | Texts | Tokens | Annotated[list[Tokens], Field(max_length=1024, fail_fast=True)] = ""
    max_tokens: Annotated[int, Field(strict=True, ge=0, le=MOST_TOKENS)] | None = Field(None, description="16 if null")
    echo: bool | None = None
    logprobs: Annotated[int, Field(strict=True, ge=0, le=MOST_TOP)] | None = None
    best_of: NotHonoured = None
    suffix: NotHonoured = None

    @property
    def prompts(self) -> "Sequence[str | list[int]]":
        """Raises Refusal for none, or too many."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if not given:
            raise Refusal(422, "prompt is an empty list", param="prompt")
        if all(isinstance(token, int) for token in given):
            return [[token for token in given if isinstance(token, int)]]
        if len(given) * (self.n or 1) > MOST_CHOICES:
            raise Refusal(422, f"prompts times n are more than {MOST_CHOICES}", param="prompt")
        return [one for one in given if isinstance(one, str | list)]

    def check(self) -> None:
        self.refuse_unhonoured("suffix", *(() if self.best_of in (None, self.n or 1) else ("best_of",)))


class ContentPart(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    type: Literal["text"]
    text: Text


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[ContentPart], Field(fail_fast=True)]
    name: Text | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(Asked):
    """Flattened: the contents of the messages, a blank line between two, are the text that the model continues.

    Models of this product have learned to continue text, not to converse.
    """

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=1000, fail_fast=True)]
    max_tokens: Annotated[int, Field(strict=True, ge=0, le=MOST_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, Field(strict=True, ge=0, le=MOST_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=MOST_TOP)] | None = None
    tools: NotHonoured = None
    tool_choice: NotHonoured = None
    functions: NotHonoured = None
    response_format: NotHonoured = None

    @property
    def prompt(self) -> str:
        return "\n\n".join(message.text for message in self.messages)

    def check(self) -> None:
        unhonoured = ["tools", "functions"]
        if self.response_format != {"type": "text"}:  # as if it were not there
            unhonoured.append("response_format")
        if self.tool_choice not in (None, "none", "auto"):  # that is, with tools, which are refused
            unhonoured.append("tool_choice")
        self.refuse_unhonoured(*unhonoured)
        if self.top_logprobs and not self.logprobs:
            raise Refusal(422, "top_logprobs needs logprobs: true", param="top_logprobs")


class TokenizeRequest(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    prompt: Text
    model: Text | None = None
    add_special_tokens: bool | None = Field(None, description="there are none to add")


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    tokens: Annotated[Tokens, Field(max_length=2**20)]
    model: Text | None = None


class PredictRequest(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    inputs: Annotated[list[Any], Field(min_length=1, max_length=1024)]
    model: Text | None = None
