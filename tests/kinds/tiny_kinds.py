"""Tiny random checkpoints of every kind of model: network, tokenizer, processor, card."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()  # The image processors warn that torchvision is not installed.

Parts: TypeAlias = "tuple[Any, list[Any]]"
"""A network, and the objects to save next to it: tokenizer, processor, feature extractor."""

WORDS = [f"w{number}" for number in range(40)]
"""Words that the tokenizers of encoders know, besides ``query``, ``passage`` and punctuation."""
SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<unk>", "<|im_start|>", "<image>", "<video>", "<|vision_start|>"]
SPECIAL_TOKENS += ["<|vision_end|>", "<|im_end|>", "<audio>"]
PICTURE_SIZE = 56
"""Width and height of the pictures that the vision-language models read, in pixels."""
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] in ('image', 'image_url') %}PICTURE{% elif part['type'] == 'text' %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_NETWORK = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
# The range is larger than the default, so that outputs differ clearly.
_ENCODER = {**_NETWORK, "max_position_embeddings": 64, "initializer_range": 0.2}
_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER = {
    **_ENCODER, **_ENDS, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 120, "max_position_embeddings": 4096
}  # fmt: skip
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_VISION = {**_NETWORK, "image_size": PICTURE_SIZE, "patch_size": 14}
_QWEN_VISION = {"depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 14, "temporal_patch_size": 2}
_QWEN_TOKENS = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
_PROJECTED = 16  # Output dimensions of the BERT embedding model and of CLIP.


def pair(name: str, directory: Path) -> tuple[Path, Path]:
    """Write two parents of a kind to ``directory/a`` and ``directory/b``. The second is the first plus noise."""
    return write(name, directory / "a"), write(name, directory / "b", noise=0.02)


def write(name: str, directory: Path, *, seed: int = 1, noise: float = 0.0) -> Path:
    """Write a checkpoint of a kind.

    ``noise`` is added to every tensor, relative to its root mean square. For a tensor of zeros, it is 0.02.
    """
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network, companions = KINDS[name]()
        if noise:
            torch.manual_seed(seed + 1)
            tensors = {tensor.data_ptr(): tensor for tensor in network.state_dict().values()}  # Tied ones once.
            for tensor in tensors.values():
                if tensor.is_floating_point():
                    scale = float(tensor.square().mean().sqrt()) or 1.0
                    tensor.add_(noise * scale * torch.randn_like(tensor))
        network.save_pretrained(str(directory))
        for companion in companions:
            companion.save_pretrained(str(directory))
    (directory / "README.md").write_text("---\nlicense: apache-2.0\n---\n\n# A tiny random model\n")
    return directory


def word_tokenizer(*, last_token: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer of words for encoders, or for an embedding model that pools the last token."""
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [*specials, "query", "passage", ":", ".", *WORDS]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "sep_token": "[SEP]", "model_max_length": 64}
    if last_token:
        backend.post_processor = processors.TemplateProcessing(single="$A [SEP]", special_tokens=[("[SEP]", 3)])
        return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="[SEP]", padding_side="left", **names)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, cls_token="[CLS]", mask_token="[MASK]", **names)


def letter_tokenizer(*, picture: str = "<image>", ends: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer of printable characters, with ``picture`` for a picture in its chat template.

    ``ends`` appends ``</s>`` to each text, as encoder-decoder models do.
    """
    letters = [*SPECIAL_TOKENS, *map(chr, range(32, 127)), "\n"]
    backend = Tokenizer(models.WordLevel({token: number for number, token in enumerate(letters)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    if ends:
        backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    extra = {"image_token": "<image>", "boi_token": "<|vision_start|>", "eoi_token": "<|vision_end|>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **{"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        extra_special_tokens={**extra, **{token: token for token in SPECIAL_TOKENS[9:]}},
        clean_up_tokenization_spaces=False,
        chat_template=None if ends else CHAT_TEMPLATE.replace("PICTURE", picture),
    )


def _encoder(head: str = "Model", family: str = "Bert", **settings: Any) -> Parts:
    """Return an encoder and its tokenizer. ``head`` is the part of the name of its class after the family."""
    tokenizer = word_tokenizer()
    configuration = getattr(transformers, f"{family}Config")
    values = {**_ENCODER, "vocab_size": len(tokenizer), "pad_token_id": 0, **settings}
    return getattr(transformers, family + head)(configuration(**values)), [tokenizer]


def _embedding(transformer: Parts, *modules: Any, **settings: Any) -> Parts:
    """Return a sentence-transformers model with the given modules after the transformer and its pooling."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer

    with TemporaryDirectory() as directory:
        _save(transformer, directory)
        stack = [Transformer(directory, max_seq_length=64), *modules]
        return SentenceTransformer(modules=stack, device="cpu", **settings), []


def _save(parts: Parts, directory: str) -> None:
    for part in (parts[0], *parts[1]):
        part.save_pretrained(directory)


def _bert_embedding() -> Parts:
    from sentence_transformers.base.modules import Dense
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

    return _embedding(_encoder(), Pooling(32, pooling_mode="mean"), Dense(32, _PROJECTED), Normalize())


def _modernbert_embedding() -> Parts:
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

    ends = {"cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3, "num_hidden_layers": 3}
    return _embedding(_encoder(family="ModernBert", **ends), Pooling(32, pooling_mode="cls"), Normalize())


def _qwen3_embedding() -> Parts:
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

    tokenizer = word_tokenizer(last_token=True)
    settings = {**_DECODER, "vocab_size": len(tokenizer), "eos_token_id": 3, "bos_token_id": None}
    model = transformers.Qwen3Model(transformers.Qwen3Config(**settings, tie_word_embeddings=True))
    modules = (Pooling(32, pooling_mode="lasttoken"), Normalize())
    return _embedding((model, [tokenizer]), *modules, prompts={"query": "query: ", "document": "passage: "})


def _sparse_encoder() -> Parts:
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    with TemporaryDirectory() as directory:
        _save(_encoder("ForMaskedLM"), directory)
        transformer = Transformer(directory, transformer_task="fill-mask", max_seq_length=64)
        return SparseEncoder(modules=[transformer, SpladePooling()], device="cpu"), []


def _cross_encoder() -> Parts:
    from sentence_transformers import CrossEncoder

    with TemporaryDirectory() as directory:
        _save(_encoder("ForSequenceClassification", num_labels=1), directory)
        return CrossEncoder(directory, device="cpu", max_length=64), []


def _older_cross_encoder() -> Parts:
    """Return a cross-encoder in the files of sentence-transformers before release 5: without ``modules.json``."""
    activation = "torch.nn.modules.linear.Identity"
    return _encoder("ForSequenceClassification", num_labels=1, sbert_ce_default_activation_function=activation)


def _vision_language(
    family: str, text: Mapping[str, Any], vision: Mapping[str, Any], *, picture: str = "<image>", **settings: Any
) -> Parts:
    """Return a vision-language model. Families whose processor needs torchvision get their image processor only."""
    config = transformers.AutoConfig.for_model(
        family, text_config={**_DECODER, **text}, vision_config=dict(vision), **settings
    )
    network = transformers.AutoModelForImageTextToText.from_config(config)
    tokenizer = letter_tokenizer(picture=picture)
    return network, [tokenizer, *_image_processors(family, tokenizer)]


def _image_processors(family: str, tokenizer: PreTrainedTokenizerFast) -> list[Any]:
    square = {"height": PICTURE_SIZE, "width": PICTURE_SIZE}
    template = tokenizer.chat_template
    if family == "llava":
        images = transformers.CLIPImageProcessorPil(size={"shortest_edge": PICTURE_SIZE}, crop_size=square)
        strategy = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        return [transformers.LlavaProcessor(images, tokenizer, patch_size=14, chat_template=template, **strategy)]
    if family == "gemma3":
        images = transformers.Gemma3ImageProcessorPil(size=square)
        return [transformers.Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=4)]
    if family.startswith("qwen"):
        pixels = PICTURE_SIZE**2
        return [transformers.Qwen2VLImageProcessorPil(patch_size=14, min_pixels=pixels, max_pixels=pixels)]
    return [transformers.CLIPImageProcessorPil(size=square, do_center_crop=False)]


def _qwen2_vl(family: str) -> Parts:
    sizes = {"out_hidden_size": 32, "intermediate_size": 64}
    own = {
        "qwen2_vl": {"embed_dim": 32, "mlp_ratio": 2},
        "qwen2_5_vl": {**sizes, "fullatt_block_indexes": [1], "window_size": PICTURE_SIZE},
        "qwen3_vl": {**sizes, "deepstack_visual_indexes": [0], "num_position_embeddings": 64},
        "qwen3_5": {**sizes, "num_position_embeddings": 64},
    }
    text: dict[str, Any] = {"rope_parameters": _SECTIONS}
    if family == "qwen3_5":
        heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
        text |= {"layer_types": ["linear_attention", "full_attention"], **heads}
        text |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    vision = {**_QWEN_VISION, "spatial_merge_size": 2, **own[family]}
    return _vision_language(
        family, text, vision, picture="<|vision_start|><image><|vision_end|>", tie_word_embeddings=True, **_QWEN_TOKENS
    )


def _encoder_decoder(family: str, **settings: Any) -> Parts:
    tokenizer = letter_tokenizer(ends=True)
    values = {**_ENDS, "vocab_size": len(tokenizer), "decoder_start_token_id": 0, **settings}
    config = transformers.AutoConfig.for_model(family, **values)
    return transformers.AutoModelForSeq2SeqLM.from_config(config), [tokenizer]


_STACKS = {"d_model": 32, "init_std": 0.2}
for _part in ("encoder", "decoder"):
    _STACKS |= {f"{_part}_layers": 2, f"{_part}_attention_heads": 2, f"{_part}_ffn_dim": 64}


def _whisper() -> Parts:
    tags = ["<|endoftext|>", "<|startoftranscript|>", "<|notimestamps|>"]
    vocabulary = {token: number for number, token in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), *tags])}
    end, start, plain = (vocabulary[tag] for tag in tags)
    special = {"pad_token": tags[0], "additional_special_tokens": tags}
    tokenizer = transformers.WhisperTokenizer(vocab=vocabulary, merges=[], **special)
    features = transformers.WhisperFeatureExtractor(feature_size=8, n_fft=400, chunk_length=2)
    ends = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end, "decoder_start_token_id": start}
    sizes = {"num_mel_bins": 8, "max_source_positions": 100, "max_target_positions": 64}
    settings = {**_STACKS, **sizes, **ends, "vocab_size": len(vocabulary)}
    config = transformers.WhisperConfig(**settings, suppress_tokens=None, begin_suppress_tokens=None)
    network = transformers.WhisperForConditionalGeneration(config)
    network.generation_config = transformers.GenerationConfig(
        **ends, is_multilingual=False, no_timestamps_token_id=plain, max_length=32, forced_decoder_ids=None
    )
    return network, [transformers.WhisperProcessor(features, tokenizer)]


def _ctc() -> Parts:
    letters = ["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefghijklmnopqrstuvwxyz'"]
    with TemporaryDirectory() as directory:
        file = Path(directory) / "vocab.json"
        file.write_text(json.dumps({letter: number for number, letter in enumerate(letters)}))
        tokenizer = transformers.Wav2Vec2CTCTokenizer(str(file))
    features = transformers.Wav2Vec2FeatureExtractor(return_attention_mask=False)
    convolutions = {"conv_dim": (16, 16), "conv_stride": (10, 8), "conv_kernel": (10, 8), "num_feat_extract_layers": 2}
    positions = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
    config = transformers.Wav2Vec2Config(
        **_ENCODER, **convolutions, **positions, vocab_size=len(letters), pad_token_id=0
    )
    return transformers.Wav2Vec2ForCTC(config), [transformers.Wav2Vec2Processor(features, tokenizer)]


def _clip() -> Parts:
    tokenizer = letter_tokenizer(ends=True)
    text = {**_ENCODER, **_ENDS, "vocab_size": len(tokenizer)}
    config = transformers.CLIPConfig(text_config=text, vision_config=_VISION, projection_dim=_PROJECTED)
    square = {"height": PICTURE_SIZE, "width": PICTURE_SIZE}
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": PICTURE_SIZE}, crop_size=square)
    return transformers.CLIPModel(config), [transformers.CLIPProcessor(images, tokenizer)]


def _audio_language() -> Parts:
    audio = {**_STACKS, "num_mel_bins": 8, "max_source_positions": 100, "model_type": "qwen2_audio_encoder"}
    config = transformers.Qwen2AudioConfig(
        text_config={**_DECODER, "model_type": "qwen2"}, audio_config=audio, audio_token_index=10
    )
    tokenizer = letter_tokenizer()
    features = transformers.WhisperFeatureExtractor(feature_size=8, n_fft=400, chunk_length=2)
    processor = transformers.Qwen2AudioProcessor(
        features, tokenizer, audio_token="<audio>", chat_template=tokenizer.chat_template
    )
    return transformers.Qwen2AudioForConditionalGeneration(config), [processor]


def _text_generator() -> Parts:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_DECODER)), [letter_tokenizer()]


_PROJECTOR = {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
_LLAMA4_VISION = {**_VISION, "intermediate_size": 128, **_PROJECTOR}
_LLAMA4_TEXT = {"intermediate_size_mlp": 64, "num_local_experts": 2, "num_experts_per_tok": 1}
_IMAGE = {"image_token_index": 5}
_IMAGE_ENDS = {**_IMAGE, "boi_token_index": 7, "eoi_token_index": 8}
_START = "<|vision_start|>"  # Gemma's processor puts the image tokens around it.
_PIXTRAL = {**_VISION, "model_type": "pixtral", "head_dim": 16}
_INTERN = {**_VISION, "image_size": [PICTURE_SIZE] * 2, "patch_size": [14, 14]}
_CLIP = {**_VISION, "model_type": "clip_vision_model", "projection_dim": 32}

VISION_LANGUAGE: Mapping[str, Callable[[], Parts]] = {
    "qwen2_vl": lambda: _qwen2_vl("qwen2_vl"),
    "qwen2_5_vl": lambda: _qwen2_vl("qwen2_5_vl"),
    "qwen3_vl": lambda: _qwen2_vl("qwen3_vl"),
    "qwen3_5": lambda: _qwen2_vl("qwen3_5"),
    "gemma3": lambda: _vision_language(
        "gemma3", {"sliding_window": 16}, _VISION, picture=_START, mm_tokens_per_image=4, **_IMAGE_ENDS
    ),
    "llama4": lambda: _vision_language("llama4", _LLAMA4_TEXT, _LLAMA4_VISION, **_IMAGE_ENDS),
    "mistral3": lambda: _vision_language("mistral3", {"model_type": "mistral"}, _PIXTRAL, **_IMAGE),
    "internvl": lambda: _vision_language("internvl", {"model_type": "qwen2"}, _INTERN, image_token_id=5),
    "llava": lambda: _vision_language("llava", {"model_type": "llama"}, _CLIP, **_IMAGE),
}
"""Vision-language models by family. llava and gemma3 have a processor that works without torchvision."""

KINDS: Mapping[str, Callable[[], Parts]] = {
    "text generator": _text_generator, "bert embedding": _bert_embedding, "modernbert embedding": _modernbert_embedding,
    "qwen3 embedding": _qwen3_embedding, "sparse encoder": _sparse_encoder, "cross-encoder": _cross_encoder,
    "older cross-encoder": _older_cross_encoder,
    "reranker without modules": lambda: _encoder("ForSequenceClassification", num_labels=1), **VISION_LANGUAGE,
    "whisper": _whisper, "wav2vec2": _ctc, "audio language model": _audio_language,
    "t5": lambda: _encoder_decoder("t5", d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2),
    "bart": lambda: _encoder_decoder("bart", **_STACKS, max_position_embeddings=256),
    "sequence classifier": lambda: _encoder("ForSequenceClassification", num_labels=3),
    "token classifier": lambda: _encoder("ForTokenClassification", num_labels=5),
    "masked language model": lambda: _encoder("ForMaskedLM"), "bare encoder": _encoder, "clip": _clip,
}  # fmt: skip
"""Builders of the checkpoints by name."""
