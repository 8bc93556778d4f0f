"""Language models of transformers as training steps: small configurations, random weights, dropout as by default."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import nn

import irongrad as ig

VOCABULARY = 99
BATCH = 2
LENGTH = 16


def _tokens(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, length))


def _step(model: nn.Module, inputs: dict[str, torch.Tensor]) -> ig.TrainStep:
    """A step whose loss the model makes itself, from `labels`."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    return ig.TrainStep(model=model, loss=None, optimizer=optimizer, inputs=inputs)


def _encoder(kind: type[nn.Module], config: Any) -> ig.TrainStep:
    """Masked language modelling; every fourth position is predicted."""
    tokens = _tokens()
    labels = torch.where(torch.arange(LENGTH) % 4 == 0, tokens, -100)
    mask = torch.ones_like(tokens)
    mask[1, LENGTH // 2 :] = 0
    return _step(kind(config), {"input_ids": tokens, "attention_mask": mask, "labels": labels})


def _decoder(kind: type[nn.Module], config: Any) -> ig.TrainStep:
    tokens = _tokens()
    return _step(kind(config), {"input_ids": tokens, "labels": tokens.clone()})


_ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
_DECODER = {**_ENCODER, "num_key_value_heads": 2, "use_cache": False, "pad_token_id": None}


def bert() -> ig.TrainStep:
    """Devlin et al., arXiv:1810.04805."""
    return _encoder(hf.BertForMaskedLM, hf.BertConfig(**_ENCODER))


def roberta() -> ig.TrainStep:
    """Liu et al., arXiv:1907.11692."""
    return _encoder(hf.RobertaForMaskedLM, hf.RobertaConfig(**_ENCODER))


def distilbert() -> ig.TrainStep:
    """Sanh et al., arXiv:1910.01108."""
    config = hf.DistilBertConfig(vocab_size=VOCABULARY, dim=32, n_layers=2, n_heads=4, hidden_dim=64)
    return _encoder(hf.DistilBertForMaskedLM, config)


def gpt2() -> ig.TrainStep:
    """Radford et al., "Language models are unsupervised multitask learners", 2019."""
    config = hf.GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=4, use_cache=False, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    return _decoder(hf.GPT2LMHeadModel, config)


def llama() -> ig.TrainStep:
    """Touvron et al., arXiv:2302.13971."""
    return _decoder(hf.LlamaForCausalLM, hf.LlamaConfig(**_DECODER))


def mistral() -> ig.TrainStep:
    """Jiang et al., arXiv:2310.06825; with a sliding window shorter than the text."""
    return _decoder(hf.MistralForCausalLM, hf.MistralConfig(**_DECODER, sliding_window=8))


def qwen2() -> ig.TrainStep:
    """Yang et al., arXiv:2407.10671."""
    return _decoder(hf.Qwen2ForCausalLM, hf.Qwen2Config(**_DECODER))


def mixtral(layers: int = 2) -> ig.TrainStep:
    """Jiang et al., arXiv:2401.04088; with the router's auxiliary loss."""
    sizes = {**_DECODER, "num_hidden_layers": layers}
    config = hf.MixtralConfig(
        **sizes, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, sliding_window=None
    )
    return _decoder(hf.MixtralForCausalLM, config)


def mamba() -> ig.TrainStep:
    """Gu and Dao, arXiv:2312.00752."""
    config = hf.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=32, state_size=8, num_hidden_layers=2, use_cache=False, pad_token_id=0
    )
    return _decoder(hf.MambaForCausalLM, config)


def t5() -> ig.TrainStep:
    """Raffel et al., arXiv:1910.10683."""
    config = hf.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0,
        pad_token_id=0, eos_token_id=1, use_cache=False,
    )  # fmt: skip
    return _step(hf.T5ForConditionalGeneration(config), {"input_ids": _tokens(), "labels": _tokens(8)})


def bart() -> ig.TrainStep:
    """Lewis et al., arXiv:1910.13461."""
    config = hf.BartConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return _step(hf.BartForConditionalGeneration(config), {"input_ids": _tokens(), "labels": _tokens(8)})


def whisper() -> ig.TrainStep:
    """Radford et al., arXiv:2212.04356; the features are a log-mel spectrogram's, here noise."""
    config = hf.WhisperConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=16, max_source_positions=20,
        max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        use_cache=False, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    features = torch.randn(BATCH, 16, 40)
    model = hf.WhisperForConditionalGeneration(config)
    return _step(model, {"input_features": features, "labels": _tokens(8)})


MODELS = {
    "BERT": bert,
    "RoBERTa": roberta,
    "DistilBERT": distilbert,
    "GPT-2": gpt2,
    "Llama": llama,
    "Mistral": mistral,
    "Qwen2": qwen2,
    "Mixtral": mixtral,
    "T5": t5,
    "BART": bart,
    "Whisper": whisper,
    "Mamba": mamba,
}
