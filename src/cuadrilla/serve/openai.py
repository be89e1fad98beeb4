"""Requests in the form of OpenAI's API: the fields that are honoured, with their bounds.

An unknown field is ignored, as other servers do, because clients send fields of their own. A known field is refused by
name if it is wrong or cannot be honoured. `top_k` and `ignore_eos` are additions that other servers have, too.
"""

import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, StrictStr

from cuadrilla.model.sampling import Sampling

MAX_CHOICES, MAX_PROMPTS, MAX_TOP = 64, 1024, 20
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 256


def _unicode(text: str) -> str:
    """Raises ValueError for half of a surrogate pair, which JSON can contain and UTF-8 cannot encode."""
    text.encode()
    return text


def _nothing(value: Any) -> Any:
    if value:
        raise ValueError("cannot be served here")
    return value


Text = Annotated[StrictStr, AfterValidator(_unicode)]
Token = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(min_length=1, fail_fast=True)]
"""Only the first error in a list is reported: reporting a million of them takes seconds."""
Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
ListsOfTokens = Annotated[
    list[Annotated[list[Token], Field(fail_fast=True)]], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)
]
StopText = Annotated[Text, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
MaxTokens = Annotated[int, Field(strict=True, ge=0, le=2**20)]
Top = Annotated[int, Field(strict=True, ge=0, le=MAX_TOP)]
Nothing = Annotated[Any, AfterValidator(_nothing)]
"""A field that cannot be honoured. It is accepted if it asks for nothing."""


class StreamOptions(BaseModel):
    include_usage: bool = False


class Asked(BaseModel):
    """The fields that both kinds of completion have."""

    model: Text | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(strict=True, ge=-1, le=2**31)] | None = Field(None, description="0 or -1: all tokens")
    n: Annotated[int, Field(strict=True, ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    max_tokens: MaxTokens | None = None
    ignore_eos: bool | None = Field(None, description="go on behind the end-of-text token, for load tests")
    logit_bias: Nothing = None

    def sampling(self, *, max_tokens: int, end_of_text: int) -> Sampling:
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(self.top_k or 0, 0),
            top_p=1.0 if self.top_p is None else self.top_p,
            max_tokens=max_tokens,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_ids=() if self.ignore_eos else (end_of_text,),
            seed=secrets.randbits(48) if self.seed is None else self.seed,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
        )


class CompletionRequest(Asked):
    prompt: Text | Texts | Tokens | ListsOfTokens = ""
    echo: bool = False
    logprobs: Top | None = None
    best_of: Literal[1] | None = None
    suffix: Nothing = None

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        tokens = [token for token in self.prompt if isinstance(token, int)]
        return [tokens] if tokens else [one for one in self.prompt if isinstance(one, str | list)]

    @property
    def num_top(self) -> int | None:
        return self.logprobs

    def tokens_at_most(self, _context: int) -> int:
        return 16 if self.max_tokens is None else self.max_tokens  # as in OpenAI's API


class ContentPart(BaseModel):
    type: Literal["text"]
    text: Text


class ChatMessage(BaseModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[ContentPart], Field(fail_fast=True)]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class PlainFormat(BaseModel):
    type: Literal["text"]


class ChatRequest(Asked):
    """The model continues one text: the contents of all messages, separated by blank lines.

    Models of this product have learned to continue text, not to converse.
    """

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=1000, fail_fast=True)]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Top | None = None
    tools: Nothing = None
    functions: Nothing = None
    tool_choice: Literal["none", "auto"] | None = None
    response_format: PlainFormat | None = None

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        return ["\n\n".join(message.text for message in self.messages)]

    @property
    def num_top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def echo(self) -> bool:
        return False

    def tokens_at_most(self, context: int) -> int:
        given = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return context if given is None else given


class PredictRequest(BaseModel):
    inputs: Annotated[list[Any], Field(min_length=1, max_length=1024)]
    model: Text | None = None
