"""The tokenizer: turns text into ids and ids into text, for a Hugging Face folder or a GGUF file. Its methods
have the names of transformers' tokenizers.

The `tokenizers` library encodes. Decoding goes token by token through bytes (TokenBytes), so that a whole
text and a stream of tokens (detokenizer.py) cannot differ. chat_template.py renders chat templates, and
gguf_tokenizer.py reads GGUF metadata.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from shoal.errors import CheckpointError, RequestError
from shoal.files.json_file import read_bounded, read_object
from shoal.text import gguf_tokenizer

if TYPE_CHECKING:
    from shoal.text.chat_template import ChatTemplate
    from shoal.text.thinking import Thinking

logger = logging.getLogger(__name__)

MAX_TOKENIZER_BYTES = 256 << 20  # the largest published tokenizer.json has 33 MB
MAX_TEMPLATE_BYTES = 1 << 20
LONG_TEXT = 4096  # characters; a text of this length takes milliseconds to encode
ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


class TokenizerFiles(Protocol):
    """The part of a resolved checkpoint that `load_tokenizer` reads."""

    @property
    def kind(self) -> str: ...  # "gguf", or another name for a folder

    @property
    def path(self) -> Path: ...  # named in errors

    @property
    def folder(self) -> Path: ...

    @property
    def metadata(self) -> Mapping[str, Any]: ...  # only for a GGUF file


def load_tokenizer(
    files: TokenizerFiles, tokenizer: str | None = None, chat_template: str | None = None
) -> Tokenizer:
    """Returns the checkpoint's own tokenizer, or the one at the path `tokenizer` (a folder or a
    tokenizer.json).

    `chat_template` is a template or the path of one. It replaces the tokenizer's own. Raises CheckpointError
    if a file is missing or damaged.
    """
    if tokenizer is not None:
        path = Path(tokenizer)
        loaded = Tokenizer.from_folder(path.parent if path.is_file() else path)
    elif files.kind == "gguf":
        try:
            loaded = Tokenizer.from_gguf(files.metadata)
        except CheckpointError as error:
            raise CheckpointError(f"{files.path}: {error}") from None
    else:
        loaded = Tokenizer.from_folder(files.folder)
    if chat_template is not None:
        loaded.chat_templates = {"default": _text_or_file(chat_template)}
    return loaded


def end_token_ids(of_model: Iterable[int], tokenizer: Tokenizer | None, vocab_size: int) -> tuple[int, ...]:
    """Returns every end-of-text id. Llama 3, for example, has several. Ids of a config that the model does
    not have are left out."""
    ids = dict.fromkeys((*of_model, *(tokenizer.eos_token_ids if tokenizer is not None else ())))
    return tuple(i for i in ids if i < vocab_size)


class Tokenizer:
    """One model's tokenizer. An id beyond the vocabulary decodes to an empty text without an error, because
    models pad their vocabularies."""

    def __init__(
        self,
        backend: Backend,
        special_tokens: Mapping[str, str],
        eos_token_ids: Iterable[int] = (),
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        """`special_tokens` maps roles to texts: {"bos_token": text, ...}. `chat_templates` maps names to
        templates: "default" is used unless there are tools and a template "tool_use"."""
        backend.no_truncation()
        backend.no_padding()
        # Special tokens are left out of decoded text, even if the file does not mark them as special.
        marked = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        backend.add_special_tokens(
            [
                AddedToken(t, normalized=False)
                for t in special_tokens.values()
                if t not in marked and backend.token_to_id(t) is not None
            ]
        )
        self._backend = backend
        self.special_tokens_map = dict(special_tokens)
        # A byte order mark, written by editors of Windows, is not part of the template.
        self.chat_templates = {
            name: template.removeprefix("\ufeff") for name, template in (chat_templates or {}).items()
        }
        self._compiled: dict[str, ChatTemplate] = {}  # the model's own templates, by name
        self._told_of_tools = (
            False  # True once the log has a warning that the template has no place for tools
        )
        own = [self.eos_token_id] if self.eos_token_id is not None else []
        self.eos_token_ids = tuple(dict.fromkeys([*own, *eos_token_ids]))
        self.all_special_ids = sorted(
            i for i, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.token_bytes = TokenBytes(backend)
        self.shown_bytes = TokenBytes(backend, hidden=self.all_special_ids)

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """Raises CheckpointError if tokenizer.json is missing or damaged, or if its tokens cannot be decoded
        one by one.

        tokenizer.json itself says which tokens `encode` adds around a text. As in transformers, add_bos_token
        in tokenizer_config.json is not read.
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(
                f"{folder} has no tokenizer.json; save one there with transformers' "
                "AutoTokenizer.save_pretrained, "
                "or name a folder that has one with the option `tokenizer`"
            )
        content = read_bounded(file, MAX_TOKENIZER_BYTES).removeprefix(codecs.BOM_UTF8)
        with refusing(f"{file} must be a tokenizer"):
            backend = Backend.from_buffer(content)
        settings = read_object(folder / "tokenizer_config.json")
        named = read_object(folder / "special_tokens_map.json")
        special = {}
        for role in ROLES:
            source = "tokenizer_config.json" if role in settings else "special_tokens_map.json"
            if text := _token_text({**named, **settings}.get(role), f"{folder / source}: {role}"):
                special[role] = text
        config = read_object(folder / "config.json")
        generation = read_object(folder / "generation_config.json")
        ends = _ids(
            generation.get("eos_token_id"), f"{folder / 'generation_config.json'}: eos_token_id"
        ) or _ids(config.get("eos_token_id"), f"{folder / 'config.json'}: eos_token_id")
        begins = _ids(config.get("bos_token_id"), f"{folder / 'config.json'}: bos_token_id")
        for role, ids in (("bos_token", begins), ("eos_token", ends)):
            if role not in special and ids and (text := backend.id_to_token(ids[0])) is not None:
                special[role] = text
        templates = _chat_templates(folder, settings)
        with refusing(f"{file} must be a tokenizer"):
            try:
                return cls(backend, special, ends, templates)
            except CheckpointError as error:
                raise CheckpointError(f"{file}: {error}") from None

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Builds the tokenizer of a GGUF file from its metadata. Raises CheckpointError as
        gguf_tokenizer.build_backend does."""
        templates = gguf_tokenizer.chat_templates(metadata)
        with refusing("the tokenizer in the GGUF file is damaged"):
            backend = gguf_tokenizer.build_backend(metadata)
            return cls(
                backend,
                gguf_tokenizer.special_tokens(metadata),
                gguf_tokenizer.end_token_ids(metadata, backend),
                templates,
            )

    # Text and ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of a text. Raises RequestError for a lone surrogate. Other threads run while a long
        text is encoded."""
        try:
            if len(text) < LONG_TEXT:  # encode_batch_fast releases the GIL, but has a higher fixed cost
                return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError:
            raise RequestError(
                f"the prompt must be a str without lone surrogates, got {text!r:.80}; remove them"
            ) from None
        except BaseException as error:
            if type(error) is not Exception and not _is_panic(error):
                raise
            # The library raises a bare Exception if the vocabulary lacks the model's own unk_token, and
            # panics if a pattern of the checkpoint's pre-tokenizer backtracks too much.
            raise RequestError(
                f"the model's tokenizer cannot encode the prompt {text!r:.80}: {error}; "
                "change or shorten it, or give another tokenizer with the option `tokenizer`"
            ) from None

    @functools.cached_property
    def longest_token(self) -> int:
        """Returns the largest number of bytes of text per token. The first call visits every token."""
        longest = max((len(self.token_bytes[i]) for i in range(len(self))), default=1)
        # A normalizer may shorten a text before it is cut into tokens: four bytes of a composed letter may
        # become one.
        return max(1, longest) * (1 if self._backend.normalizer is None else 4)

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> dict[str, Any]:
        """Returns {"input_ids": ids}; for a list of texts, `input_ids` is a list of lists."""
        if isinstance(text, str):
            return {"input_ids": self.encode(text, add_special_tokens)}
        return {"input_ids": [self.encode(each, add_special_tokens) for each in text]}

    def decode(self, token_ids: int | Iterable[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of ids. Bytes of incomplete characters become U+FFFD."""
        pieces = self.shown_bytes if skip_special_tokens else self.token_bytes
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        text = b"".join([pieces[i] for i in ids]).decode("utf-8", pieces.errors)
        return text.removeprefix(" ") if pieces.strips_first_space else text

    def token_text(self, token_id: int) -> str:
        """Returns the text of one token. Special tokens are shown, a leading space stays, and an incomplete
        character becomes U+FFFD."""
        return self.token_bytes[token_id].decode("utf-8", self.token_bytes.errors)

    def bad_word_ids(self, words: Iterable[str], vocab_size: int) -> tuple[tuple[int, ...], ...]:
        """Returns the token sequences of these words. A word also counts with a space before it, if it then
        has the same number of tokens and another first token; this rule is vLLM's.

        Sequences with ids from `vocab_size` are left out, as the model cannot sample them. Raises
        RequestError for a word without tokens.
        """
        found: list[tuple[int, ...]] = []
        for word in words:
            bare, spaced = (
                tuple(self.encode(prefix + word.lstrip(), add_special_tokens=False)) for prefix in ("", " ")
            )
            if not bare:
                raise RequestError(
                    f"bad_words must have tokens, got {word!r}; give words with at least one visible "
                    "character",
                    field="bad_words",
                )
            found.append(bare)
            if spaced[0] != bare[0] and len(spaced) == len(bare):
                found.append(spaced)
        return tuple(ids for ids in found if max(ids) < vocab_size)

    # The vocabulary

    def convert_ids_to_tokens(self, token_ids: int | Iterable[int]) -> Any:
        """Returns tokens in the vocabulary's spelling, and None for an id beyond it."""
        return (
            self._backend.id_to_token(token_ids)
            if isinstance(token_ids, int)
            else [self._backend.id_to_token(i) for i in token_ids]
        )

    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> Any:
        return (
            self._backend.token_to_id(tokens)
            if isinstance(tokens, str)
            else [self._backend.token_to_id(t) for t in tokens]
        )

    def get_vocab(self) -> dict[str, int]:
        return self._backend.get_vocab(with_added_tokens=True)

    @property
    def added_tokens(self) -> list[str]:
        return [token.content for token in self._backend.get_added_tokens_decoder().values()]

    @property
    def vocab_size(self) -> int:
        """Number of tokens without added ones; len() counts all."""
        return self._backend.get_vocab_size(with_added_tokens=False)

    def __len__(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens_map.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens_map.get("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._backend.token_to_id(self.bos_token) if self.bos_token is not None else None

    @property
    def eos_token_id(self) -> int | None:
        return self._backend.token_to_id(self.eos_token) if self.eos_token is not None else None

    # Conversations

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tokenize: bool = True,
        tool_call_parser: str = "hermes",
        **variables: Any,
    ) -> Any:
        """Returns the prompt of a conversation: ids, or text if `tokenize` is False. Raises RequestError for
        messages that the template refuses.

        `chat_template` is a template, or the name of one that the model has. If the template has no place for
        tools, they are described in the format of `tool_call_parser`: "hermes" or "llama3_json".
        """
        template = self._template(chat_template, bool(tools))
        if tools and not template.reads_tools and not self._told_of_tools:
            self._told_of_tools = True
            logger.warning(
                "the model's chat template has no place for tools; they are described in the "
                "system prompt, in the %s format, and "
                "a model that was not trained on it may not call them",
                tool_call_parser,
            )
        text = template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tool_call_parser=tool_call_parser,
            **variables,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def thinking_variables(
        self,
        thinking: Thinking,
        given: Mapping[str, Any],
        *,
        has_tools: bool = False,
        chat_template: str | None = None,
    ) -> dict[str, Any]:
        """Returns the template's variables for what a request says about thinking, except the variables
        that it gives itself."""
        return self._template(chat_template, has_tools).thinking.of(thinking, given)

    def has_place_for_tools(self, chat_template: str | None = None) -> bool:
        """True if the template writes tools itself. Otherwise the system message describes them."""
        return self._template(chat_template, True).reads_tools

    def _template(self, given: str | None, has_tools: bool) -> ChatTemplate:
        # Imported here, because Jinja takes long to import and a plain prompt does not need it.
        from shoal.text.chat_template import ChatTemplate

        name = given or ("tool_use" if has_tools and "tool_use" in self.chat_templates else "default")
        if name not in self.chat_templates:
            if given is None:
                raise RequestError(
                    "this model has no chat template; give one with the option `chat_template` (a Jinja "
                    "template or a path "
                    "to one), or write the prompt as text"
                )
            return ChatTemplate(given, self.special_tokens_map)
        if name not in self._compiled:
            self._compiled[name] = ChatTemplate(self.chat_templates[name], self.special_tokens_map)
        return self._compiled[name]


class TokenBytes(dict[int, bytes]):
    """Maps token ids to UTF-8 bytes, possibly of an incomplete character. Each entry is computed on first
    use. Hidden and unknown ids have no bytes."""

    def __init__(self, backend: Backend, hidden: Iterable[int] = ()) -> None:
        """Raises CheckpointError for a decoder with which a token's bytes depend on its neighbours."""
        super().__init__({i: b"" for i in hidden})
        self._backend = backend
        self._added = set(backend.get_added_tokens_decoder())
        steps = {step["type"]: step for step in _decoder_steps(backend)}
        self._byte_level = "ByteLevel" in steps
        self._byte_fallback = "ByteFallback" in steps
        if not steps or not steps.keys() <= (
            {"ByteLevel", "Fuse"} if self._byte_level else SENTENCEPIECE_STEPS
        ):
            raise CheckpointError(
                f"the decoder {list(steps)} is not supported; only byte-level and SentencePiece ones are"
            )
        self.strips_first_space = (
            "Strip" in steps
            or steps.get("Metaspace", {"prepend_scheme": "never"})["prepend_scheme"] != "never"
        )
        # SentencePiece shows each invalid byte as one U+FFFD. Byte-level tokenizers show each broken
        # character as one.
        self.errors = "replace" if self._byte_level else "shoal.every-byte"

    def __missing__(self, token_id: int) -> bytes:
        if not 0 <= token_id < 1 << 32 or (token := self._backend.id_to_token(token_id)) is None:
            return b""  # Not stored, because the number of such ids is unbounded.
        self[token_id] = spelled = self._spell(token_id, token)
        return spelled

    def _spell(self, token_id: int, token: str) -> bytes:
        if self._byte_level:
            if token_id not in self._added:
                with contextlib.suppress(UnicodeEncodeError):  # a character without a byte
                    return token.translate(BYTE_OF_CHAR).encode("latin-1")
            return token.encode()
        if self._byte_fallback and (byte := BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        return token.replace("▁", " ").encode()


SENTENCEPIECE_STEPS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
codecs.register_error("shoal.every-byte", lambda error: ("\ufffd" * (error.end - error.start), error.end))  # type: ignore[attr-defined]


class _ByteChars(dict[int, int]):
    """Maps each character that byte-level vocabularies use to its byte, for str.translate. Printable Latin-1
    maps to itself; the other bytes are U+0100 and the characters after it, in order."""

    def __init__(self) -> None:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [b for b in range(256) if b not in printable]
        super().__init__({b: b for b in printable} | {0x100 + i: b for i, b in enumerate(others)})

    def __missing__(self, char: int) -> int:
        """Raises for a character without a byte: the token is then not a token of bytes."""
        return 0xFFFF


BYTE_OF_CHAR = _ByteChars()


def _decoder_steps(backend: Backend) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    decoder = json.loads(backend.decoder.__getstate__())
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _chat_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns templates by name from the files of transformers: the default one in chat_template.jinja,
    others in additional_chat_templates/NAME.jinja. Without chat_template.jinja the older places are read."""
    files = {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    default = folder / "chat_template.jinja"
    if default.is_file():
        return {name: _template_text(file) for name, file in {**files, "default": default}.items()}
    return {**_templates_in_json(folder, settings), **{name: _template_text(f) for name, f in files.items()}}


def _template_text(file: Path) -> str:
    try:
        return read_bounded(file, MAX_TEMPLATE_BYTES).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file} must be text in UTF-8: {error}") from None


def _templates_in_json(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the templates by name of chat_template.json, or else of tokenizer_config.json."""
    stored, where = read_object(folder / "chat_template.json").get("chat_template"), "chat_template.json"
    if not stored:
        stored, where = settings.get("chat_template") or {}, "tokenizer_config.json"
    if isinstance(stored, str):
        return {"default": stored}
    named: list[tuple[Any, Any]] = [(None, stored)]
    if isinstance(stored, dict):
        named = list(stored.items())
    elif isinstance(stored, list):
        named = [
            (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, entry)
            for entry in stored
        ]
    if not all(isinstance(name, str) and isinstance(template, str) for name, template in named):
        raise CheckpointError(
            f"{folder / where}: chat_template must be a template or templates by name, got {stored!r:.80}"
        )
    return dict(named)


def _text_or_file(template: str) -> str:
    """Returns `template` itself if it has braces or line breaks; otherwise reads the file at this path."""
    if "{" in template or "\n" in template:
        return template.removeprefix("\ufeff")
    try:
        return Path(template).read_text("utf-8-sig")
    except OSError as error:
        raise CheckpointError(
            f"chat_template must be a Jinja template or a readable file, got {template!r}: {error.strerror}"
        ) from None


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turns every exception of the tokenizers library inside the block into a CheckpointError that begins
    with `what`. The library raises plain Exception, and a panic of its Rust code is not even an Exception."""
    try:
        yield
    except CheckpointError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not _is_panic(error):
            raise
        raise CheckpointError(f"{what}: {error}") from None


def _is_panic(error: BaseException) -> bool:
    """True if Rust code panicked. A panic is not an Exception, and its class cannot be imported."""
    return type(error).__name__ == "PanicException"


def _token_text(value: Any, where: str) -> str | None:
    """Returns the text of a special token, which is stored as text or as a dict with the text inside."""
    text = value.get("content") if isinstance(value, dict) else value
    if text is not None and not isinstance(text, str):
        raise CheckpointError(f"{where} must be a token, got {value!r:.80}")
    return text


def _ids(value: Any, where: str) -> list[int]:
    ids = value if isinstance(value, list) else [value]
    if not all(i is None or (type(i) is int and i < 1 << 31) for i in ids):
        raise CheckpointError(f"{where} must be a token id or a list of token ids, got {value!r:.80}")
    return [i for i in ids if i is not None and i >= 0]
