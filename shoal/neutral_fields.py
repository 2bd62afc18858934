"""Fields of vLLM's parameters that Shoal does not have. Programs may pass them with neutral values; other
values are refused by name, as the answer would be wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from shoal.errors import RequestError

T = TypeVar("T")

# RequestOutputKind: `generate` returns CUMULATIVE and FINAL_ONLY outputs in any case.
WHOLE_OUTPUTS = (None, 0, 2)
SAMPLING: Mapping[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "truncate_prompt_tokens": (None,),
    "prompt_logprob_token_ids": (None, []),
    "prompt_logprob_start": (None, 0),
    "logprob_token_ids": (None, []),
    "flat_logprobs": (None, False),
    "output_kind": WHOLE_OUTPUTS,
    "stream_interval": (None, 1),
    "skip_clone": (None, False, True),
    "output_text_buffer_length": (None, 0),
    "guided_decoding": (None,),
    "logits_processors": (None, []),
    "extra_args": (None, {}),
    "thinking_token_budget": (None, -1),
    "repetition_detection": (None,),
    "routed_experts_prompt_start": (None, 0),
    "trace_decode_token_ids": (None, []),
}
BEAM_SEARCH: Mapping[str, tuple[Any, ...]] = {
    "include_stop_str_in_output": (None, False),
    "structured_outputs": (None,),
}


def takes(fields: Mapping[str, tuple[Any, ...]]) -> Callable[[type[T]], type[T]]:
    """Returns a class decorator: the constructor accepts these fields, too, each with its neutral values, and
    raises RequestError for others."""

    def decorate(cls: type[T]) -> type[T]:
        plain = cls.__init__

        @functools.wraps(plain)
        def init(self: T, *args: Any, **given: Any) -> None:
            for name in given.keys() & fields.keys():
                value = given.pop(name)
                if getattr(value, "value", value) not in fields[name]:  # an enum is compared by its number
                    raise RequestError(
                        f"{name} must be {' or '.join(map(repr, fields[name]))}, got {value!r:.100}; Shoal's "
                        f"{cls.__name__} does not have it, so leave it out",
                        field=name,
                    )
            plain(self, *args, **given)

        cls.__init__ = init  # type: ignore[method-assign, assignment]
        return cls

    return decorate
