"""Tokenizers and chat templates of the families that models come from.

Tokenizers are built by hand, in each of the ways in which real ones treat blanks, bytes, unknown
characters and special tokens. Templates come from trl, or are written here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "user assistant system tool the answer is 42.\n\nWhat is it? Yes, no; 'x' == \"y\" [INST] {}",
    "I think that the number lies between 10 and 20. \t The end .\n=2 1+1=2 hello Hello\n hello",
    " 2 + 2 = 4 <<SYS>> [/INST] def f(x):\n    return x",
] * 20
LETTERS = sorted({*"".join(map(chr, range(32, 127))), "\n", "\t", "é", "\u2581"})

# Everything that looks like a special token in a template.
SPECIAL = re.compile(
    "<\\|[A-Za-z0-9_]+\\|>|<\uff5c[^\uff5c<>]+\uff5c>|</?s>|<bos>|<eos>|<(?:start|end)_of_turn>"
    r"|\[gMASK\]|<sop>"
)


def _fast(
    backend: Tokenizer,
    special: tuple[str, ...],
    eos: str,
    bos: str | None,
    *,
    rstrip: bool = False,
    appends_eos: bool = False,
    unk: str | None = None,
) -> PreTrainedTokenizerFast:
    named = dict.fromkeys([*special, eos, *([bos] if bos else [])])
    backend.add_special_tokens(
        [AddedToken(one, special=True, normalized=False, rstrip=rstrip) for one in named]
    )
    if bos or appends_eos:
        pieces = [*([bos] if bos else []), "$A", *([eos] if appends_eos else [])]
        used = [one for one in (bos, eos) if one]
        backend.post_processor = processors.TemplateProcessing(
            single=" ".join(pieces),
            special_tokens=[(one, backend.token_to_id(one)) for one in used],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=eos, bos_token=bos, unk_token=unk
    )


def byte_level(
    special: tuple[str, ...] = (),
    eos: str = "<|endoftext|>",
    bos: str | None = None,
    *,
    prefix: bool = False,
    nfc: bool = False,
    **options: Any,
) -> PreTrainedTokenizerFast:
    """Return a tokenizer like that of GPT-2, Qwen, Llama 3 or DeepSeek."""
    backend = Tokenizer(models.BPE())
    if nfc:
        backend.normalizer = normalizers.NFC()
    words = Regex(r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    if prefix:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return _fast(backend, special, eos, bos, **options)


def _sentence_pieces() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return a vocabulary of bytes, letters and words, and the merges of these."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "\u2581")
    trained.pre_tokenizer = pre_tokenizers.Split(Regex("\u2581"), "merged_with_next")
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=LETTERS, show_progress=False, special_tokens=["<unk>"]
    )
    trained.train_from_iterator(CORPUS, trainer)
    import json

    model = json.loads(trained.to_str())["model"]
    vocab: dict[str, int] = dict(model["vocab"])
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    return vocab, [tuple(one) for one in model["merges"]]


def sentence_piece(
    special: tuple[str, ...] = (),
    eos: str = "</s>",
    bos: str | None = "<s>",
    *,
    prefix: str = "legacy",
    **options: Any,
) -> PreTrainedTokenizerFast:
    """Return a tokenizer like that of Llama 2, Mistral or Gemma, with byte fallback.

    `prefix` is "legacy" (a blank before every piece), "first", "always" or "none".
    """
    vocab, merges = _sentence_pieces()
    backend = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    blank = decoders.Replace("\u2581", " ")
    parts = [blank, decoders.ByteFallback(), decoders.Fuse()]
    if prefix == "legacy":
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
    elif prefix == "none":
        backend.normalizer = normalizers.Replace(" ", "\u2581")
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
    if prefix != "none":
        parts.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(parts)
    return _fast(backend, special, eos, bos, unk="<unk>", **options)


def unigram(
    special: tuple[str, ...] = (),
    eos: str = "</s>",
    bos: str | None = None,
    *,
    byte_fallback: bool = False,
    **options: Any,
) -> PreTrainedTokenizerFast:
    """Return a tokenizer like that of T5 or XLNet, which rewrites text and lacks characters."""
    trained = Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200,
        special_tokens=["<unk>"],
        unk_token="<unk>",
        initial_alphabet=LETTERS,
        show_progress=False,
    )
    trained.train_from_iterator(CORPUS, trainer)
    import json

    pieces = [tuple(one) for one in json.loads(trained.to_str())["model"]["vocab"]]
    if byte_fallback:
        pieces += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    backend = Tokenizer(models.Unigram(pieces, 0, byte_fallback))
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    last = [decoders.ByteFallback()] if byte_fallback else []
    backend.decoder = decoders.Sequence([*last, decoders.Metaspace(prepend_scheme="always")])
    return _fast(backend, special, eos, bos, unk="<unk>", **options)


def byt5(special: tuple[str, ...] = (), eos: str = "</s>", bos: str | None = None) -> Any:
    """A tokenizer in Python, without a backend."""
    from transformers import ByT5Tokenizer

    tokenizer = ByT5Tokenizer(extra_ids=0)
    tokenizer.add_special_tokens({"additional_special_tokens": [*special, eos]})
    return tokenizer


# Templates.

LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content.strip()"
    " + ' [/INST]' }}{% elif m.role == 'assistant' %}"
    "{{ ' ' + m.content.strip() + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}"
    "{% endfor %}"
)
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + eos_token + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
DATED = "{{ 'Today is ' + strftime_now('%d %b %Y') + '.\\n' }}" + CHATML
TRIMMED = CHATML.replace("m.content +", "(m.content | trim) +")
NAMED = {
    "default": CHATML,
    "tool_use": "{% for t in tools %}{{ t | tojson + '\\n' }}{% endfor %}" + CHATML,
}
HEADLESS = (  # a reply follows a special token directly
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
THINKING = CHATML.replace(
    "m.content +",
    "('<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' if m.reasoning_content else '')"
    " + m.content +",
)
ROLES = ("<|user|>", "<|assistant|>", "<|system|>")
TURNS = ("<|im_start|>", "<|im_end|>")
THOUGHTS = ("<think>", "</think>")


@dataclass(frozen=True, kw_only=True)
class Family:
    """A tokenizer and its chat template.

    `trains_chats`: the template writes a reply as it writes one within a prompt. `knows_all`: the
    tokenizer has tokens for every text.
    """

    make: Callable[..., Any]
    template: Any
    special: tuple[str, ...] = ()
    eos: str = "<|im_end|>"
    bos: str | None = None
    options: Mapping[str, Any] | None = None
    trains_chats: bool = True
    takes_system: bool = True
    knows_all: bool = True

    def tokenizer(self) -> Any:
        made = self.make(self.special, self.eos, self.bos, **(self.options or {}))
        made.chat_template = self.template
        return made


def _trl(name: str) -> str:
    spec = find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("trl, whose templates are used, is not installed", allow_module_level=True)
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text()


def _from_trl(
    name: str,
    eos: str,
    *,
    make: Callable[..., Any] = byte_level,
    bos: str | None = None,
    **more: Any,
) -> Family:
    template = _trl(name)
    special = tuple(dict.fromkeys(SPECIAL.findall(template)))
    return Family(make=make, template=template, special=special, eos=eos, bos=bos, **more)


def _families() -> dict[str, Family]:
    return {
        "gpt2 chatml": Family(make=byte_level, template=CHATML, special=TURNS),
        "prefixed bytes": Family(
            make=byte_level, template=CHATML, special=TURNS, options={"prefix": True}
        ),
        "qwen nfc": Family(make=byte_level, template=CHATML, special=TURNS, options={"nfc": True}),
        "appends eos": Family(
            make=byte_level, template=CHATML, special=TURNS, options={"appends_eos": True}
        ),
        "special thoughts": Family(
            make=byte_level, template=THINKING, special=(*TURNS, *THOUGHTS), options={"nfc": True}
        ),
        "named templates": Family(make=byte_level, template=NAMED, special=TURNS),
        "dated": Family(make=byte_level, template=DATED, special=TURNS),
        "trimmed": Family(make=byte_level, template=TRIMMED, special=TURNS),
        "llama2": Family(
            make=sentence_piece, template=LLAMA_2, eos="</s>", bos="<s>", takes_system=False
        ),
        "llama2 first": Family(
            make=sentence_piece,
            template=LLAMA_2,
            eos="</s>",
            bos="<s>",
            options={"prefix": "first"},
            takes_system=False,
        ),
        "zephyr": Family(make=sentence_piece, template=ZEPHYR, eos="</s>", bos="<s>"),
        "tinyllama always": Family(
            make=sentence_piece,
            template=ZEPHYR,
            eos="</s>",
            bos="<s>",
            options={"prefix": "always"},
        ),
        "legacy headless": Family(
            make=sentence_piece, template=HEADLESS, special=ROLES, eos="</s>", bos="<s>"
        ),
        "first headless": Family(
            make=sentence_piece,
            template=HEADLESS,
            special=ROLES,
            eos="</s>",
            bos="<s>",
            options={"prefix": "first"},
        ),
        "legacy thoughts": Family(
            make=sentence_piece, template=THINKING, special=(*TURNS, *THOUGHTS), bos="<s>"
        ),
        "legacy appends eos": Family(
            make=sentence_piece,
            template=ZEPHYR,
            eos="</s>",
            bos="<s>",
            options={"appends_eos": True},
        ),
        "unigram": Family(make=unigram, template=ZEPHYR, eos="</s>", knows_all=False),
        "unigram bytes": Family(
            make=unigram, template=ZEPHYR, eos="</s>", options={"byte_fallback": True}
        ),
        "byt5": Family(make=byt5, template=CHATML, special=TURNS),
        "llama3": _from_trl("llama3", "<|eot_id|>", bos="<|begin_of_text|>"),
        "llama3.1": _from_trl("llama3_1", "<|eot_id|>", bos="<|begin_of_text|>"),
        "llama3.2": _from_trl("llama3_2", "<|eot_id|>", bos="<|begin_of_text|>"),
        "gemma": _from_trl(
            "gemma",
            "<end_of_turn>",
            make=sentence_piece,
            bos="<bos>",
            options={"prefix": "none"},
            takes_system=False,
        ),
        "gemma3": _from_trl(
            "gemma3",
            "<end_of_turn>",
            make=sentence_piece,
            bos="<bos>",
            options={"prefix": "none"},
        ),
        "phi3": _from_trl(
            "phi3", "<|endoftext|>", make=sentence_piece, bos="<s>", options={"rstrip": True}
        ),
        "phi3.5": _from_trl(
            "phi3_5", "<|endoftext|>", make=sentence_piece, bos="<s>", options={"rstrip": True}
        ),
        "qwen2.5": _from_trl("qwen2_5", "<|im_end|>", options={"nfc": True}),
        "qwen3": _from_trl("qwen3", "<|im_end|>", options={"nfc": True}),
        "qwen3 2507": _from_trl("qwen3_instruct_2507", "<|im_end|>", options={"nfc": True}),
        "qwen3.5": _from_trl("qwen3_5_nothink", "<|im_end|>", options={"nfc": True}),
        "qwen3.5 thinking": _from_trl("qwen3_5_think", "<|im_end|>", options={"nfc": True}),
        "glm4": _from_trl("glm4moe", "<|endoftext|>"),
        "gpt-oss": _from_trl("gptoss", "<|return|>"),
        "deepseek v3": _from_trl(
            "deepseekv3",
            "<\uff5cend\u2581of\u2581sentence\uff5c>",
            bos="<\uff5cbegin\u2581of\u2581sentence\uff5c>",
        ),
        "deepseek r1": _from_trl(
            "deepseek_r1_distill",
            "<\uff5cend\u2581of\u2581sentence\uff5c>",
            bos="<\uff5cbegin\u2581of\u2581sentence\uff5c>",
        ),
        "command r": _from_trl("cohere", "<|END_OF_TURN_TOKEN|>", bos="<BOS_TOKEN>"),
        "command r7b": _from_trl("cohere2", "<|END_OF_TURN_TOKEN|>", bos="<BOS_TOKEN>"),
        "lfm2": _from_trl("lfm2", "<|im_end|>", bos="<|startoftext|>"),
        "nemotron": _from_trl("nemotron_3_nano", "<|im_end|>"),
    }


FAMILIES = _families()


@cache
def tokenizer_of(name: str) -> Any:
    return FAMILIES[name].tokenizer()
