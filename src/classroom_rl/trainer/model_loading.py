"""The device and dtype that training processes load their models with, and what makes a CPU train faster."""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, set_seed
from peft import PeftModel, get_peft_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments
from transformers.distributed.fsdp import is_fsdp_enabled
from transformers.integrations import apply_liger_kernel, is_deepspeed_zero3_enabled
from trl.kernels import chunked_logprob
from trl.models import prepare_deepspeed, prepare_fsdp
from trl.trainer import utils as trl_utils
from trl.trainer.utils import add_fused_lm_head, create_model_from_path

from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.training_checks import check_strong_tutor
from classroom_rl.config.values import TRAINS_TEACHER
from classroom_rl.errors import ConfigError
from classroom_rl.models.four_bit import check_quantised, keep_packed, quantisation
from classroom_rl.models.lora import peft_config
from classroom_rl.models.pretrained import check_model, load_tokenizer
from classroom_rl.trainer.distributions import share_head
from classroom_rl.trainer.padding_free import attend_within_sequences

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # of glibc's malloc.h
_NEVER, _TOP_PAD_BYTES = -1, 2**26
_TILE = (1024, 2048)
"""Tokens, and entries of the vocabulary, in one product: 8 MB of float32."""


def prepare_cpu(dtype: str) -> None:
    """Prepare this process for a training on the CPU; call it before a model is loaded.

    Args:
        dtype: that of the arithmetic. With `bfloat16`, float32 products are computed by the CPU's bfloat16 units, too,
            with operands rounded to bfloat16 and float32 sums; a CPU without such units computes them as before.
    """
    _keep_memory()
    _use_small_tiles()
    if dtype == "bfloat16":
        torch.set_float32_matmul_precision("medium")


def _keep_memory() -> None:
    """Have glibc keep large blocks when they are freed. Otherwise each large tensor is new memory, which the kernel
    fills with zeros page by page; that took up to a third of a training step's time. Another C library is left as it
    is."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, _TOP_PAD_BYTES)):
            mallopt(option, value)


def _use_small_tiles() -> None:
    """Have TRL's log-probs take small tiles, and only the tokens that have a label. TRL takes 4,096 × 32,768 at a time,
    half a gigabyte that is read and written some ten times. It takes all tokens on other devices than GPUs, because
    shapes that change would cost some of them a compilation; CPUs compile nothing."""
    chunked_logprob.TOKEN_CHUNK_SIZE, trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE = _TILE
    trl_utils._use_triton = lambda _device: True  # in this module it decides about the tokens, and nothing else


def weights_dtype(dtype: str, has_adapter: bool) -> str:
    """The dtype to load weights in, for arithmetic in `train.dtype`.

    Trained weights are float32, because bfloat16 rounds away the updates of a learning rate of 5e-7; bf16=True casts
    the arithmetic. DeepSpeed casts all weights to `train.dtype` and makes its float32 master weights from these, so
    float32 would only take memory. Weights under an adapter do not change; PEFT keeps the adapter itself in float32.
    """
    with_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false") == "true"
    return dtype if has_adapter or with_deepspeed else "float32"


def device_for_weights() -> torch.device | None:
    """The device that this process loads models onto; None for the host's memory: on CPUs that is the device itself,
    ZeRO-3 partitions weights as it reads them, and FSDP's efficient loading takes them from the first process's host
    memory."""
    device = PartialState().device
    on_host = device.type == "cpu" or is_deepspeed_zero3_enabled() or is_fsdp_enabled()
    return None if on_host else device


Reference = Callable[[Any], AbstractContextManager[Any]]
"""Gives the reference model, inside; its argument is the model that is trained."""


@dataclass(frozen=True)
class Policy:
    """What a training begins with.

    Attributes:
        model: the model that is trained, under PEFT if an adapter is. Its head gives log-probs and entropies of the
            tokens that have a label (`add_fused_lm_head`).
        tokenizer: the model's.
        reference: a second copy of the model; None without one, or if an adapter is trained: then it is the model
            without the adapter.
        has_reference: whether the loss compares the model with the reference.
        strong_tutor: whom the model is distilled from; None without one, or if a server has it.
        aux_loss_weight: the model's own weight of the loss that balances its experts; 0 if it has none.
    """

    model: PreTrainedModel | PeftModel
    tokenizer: PreTrainedTokenizerBase
    reference: PreTrainedModel | None
    has_reference: bool
    strong_tutor: PreTrainedModel | None
    aux_loss_weight: float

    def prepare_reference(self, accelerator: Accelerator) -> Reference | None:
        """The reference, distributed as the trained model is; None if the loss has none."""
        if not self.has_reference:
            return None
        if self.reference is None:
            return partial(_without_adapter, accelerator)
        prepared = prepare_frozen(self.reference, accelerator)
        return lambda _model: nullcontext(prepared)


def prepare_frozen(model: PreTrainedModel, accelerator: Accelerator) -> Any:
    """A model that is not trained, distributed as the trained one is."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return prepare_deepspeed(model, accelerator)
    if accelerator.distributed_type == DistributedType.FSDP:
        return prepare_fsdp(model, accelerator)
    return accelerator.prepare_model(model, evaluation_mode=True)


@contextmanager
def _without_adapter(accelerator: Accelerator, model: Any) -> Iterator[Any]:
    with accelerator.unwrap_model(model).disable_adapter():
        yield model


def accumulate_in_float32(accelerator: Accelerator) -> None:
    """Have DeepSpeed add up the gradients of micro-batches in float32 instead of in the dtype of its weights. Call it
    before the model is prepared."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        accelerator.state.deepspeed_plugin.deepspeed_config.setdefault("data_types", {})["grad_accum_dtype"] = "fp32"


def load_policy(config: TrainRLConfig, arguments: TrainingArguments) -> Policy:
    """Load the policy, what the loss compares it with, and a strong tutor. The training arguments must have been made:
    with ZeRO-3 they decide where weights are read to.

    Raises:
        ConfigError: if there is no such model, it has no such `train.attn_implementation`, or it cannot be trained
            without padding, which `train.padding_free` wants, or with Liger, or in 4 bits; if the strong tutor has
            other tokens, or is to be compared by distributions while the output layer is split.
    """
    key = f"{getattr(config.generation, 'trained_role', TRAINS_TEACHER)}_model.model_name_or_path"
    name, lora = config.policy_model.model_name_or_path, None
    check_model(key, name)
    tokenizer = load_tokenizer(key, name, padding_side="left")
    if config.policy_model.adapter is not None:
        lora = peft_config(config.policy_model.lora)
    distillation = config.train.distillation
    has_reference, strong_name = config.train.has_reference, distillation.model
    if distillation.is_loaded:
        check_model("train.distillation.model", strong_name)
    if strong_name is not None:
        check_strong_tutor(config, strong_name)
    dtype = weights_dtype(config.train.dtype, lora is not None)
    in_4bit = config.policy_model.load_in_4bit
    if in_4bit and (is_deepspeed_zero3_enabled() or PartialState().num_processes > 1):
        raise ConfigError(
            "teacher_model.load_in_4bit is true, which is for one process without DeepSpeed's ZeRO-3: start one, as "
            "with --config_file config/deepspeed/1GPU.yaml, or set it to false."
        )
    if distillation.compares_distributions and (is_deepspeed_zero3_enabled() or is_fsdp_enabled()):
        raise ConfigError(
            f"train.distillation.kl={distillation.kl} with top_k={distillation.top_k} compares distributions, which "
            "needs the whole output layer on each process, and ZeRO-3 and FSDP split it: start with "
            "config/deepspeed/zero2_4GPU.yaml, or take kl=reverse without top_k."
        )
    model = _load(config, name, dtype, ("log_probs", "entropy"), in_4bit)
    text_config = model.config.get_text_config()
    has_experts = hasattr(text_config, "output_router_logits")
    aux_loss_weight = getattr(text_config, "router_aux_loss_coef", 0.0) if has_experts else 0.0
    if lora is not None:
        set_seed(config.seed)  # an adapter begins with random weights
        one_dtype = is_deepspeed_zero3_enabled()  # it cannot gather weights of two (DeepSpeed issue 8072)
        model = get_peft_model(model, lora, autocast_adapter_dtype=not one_dtype)
        lora.base_model_name_or_path = config.served_teacher
        if arguments.gradient_checkpointing:
            model.enable_input_require_grads()
            if is_deepspeed_zero3_enabled():  # PEFT under ZeRO-3 recomputes with other shapes otherwise
                arguments.gradient_checkpointing_kwargs = {"use_reentrant": True}
    reference = _load(config, name, dtype, ("log_probs",)) if has_reference and lora is None else None
    strong = _load(config, strong_name, config.train.dtype, ("log_probs",)) if distillation.is_loaded else None
    if strong is not None:
        _check_vocabularies(config, text_config.vocab_size, strong.config.get_text_config().vocab_size)
    return Policy(model, tokenizer, reference, has_reference, strong, aux_loss_weight)


def _load(
    config: TrainRLConfig, name: str, dtype: str, outputs: tuple[str, ...], in_4bit: bool = False
) -> PreTrainedModel:
    device, attention = device_for_weights(), config.train.attn_implementation
    quantization_options = {"quantization_config": quantisation(name, dtype)} if in_4bit else {}
    try:
        model = create_model_from_path(
            name,
            dtype=dtype,
            device_map=None if device is None else {"": device},
            attn_implementation=attention,
            trust_remote_code=False,
            use_safetensors=True,
            **quantization_options,
        )
    except (ImportError, ValueError) as error:
        if attention is None:
            raise
        raise ConfigError(f"{name} cannot be loaded with train.attn_implementation={attention}: {error}") from error
    if in_4bit:
        check_quantised(model, name)
        keep_packed(model)
        model.hf_quantizer.remove_quantization_config(model)  # what is saved of the model is unpacked
    if config.train.padding_free and (problem := attend_within_sequences(model)) is not None:
        raise ConfigError(
            f"train.padding_free is true, but {name} cannot be trained without padding: {problem}. Set it to false, or "
            "change train.attn_implementation if that is why."
        )
    if config.train.use_liger_kernel:
        _use_liger(model)
    add_fused_lm_head(model, temperature=config.policy_model.vllm.temperature, outputs=outputs)
    if config.train.distillation.compares_distributions:
        share_head(model, config.policy_model.vllm.temperature)
    return model


def _check_vocabularies(config: TrainRLConfig, vocabulary: int, strong_vocabulary: int) -> None:
    distillation = config.train.distillation
    if distillation.compares_distributions and distillation.top_k is None and vocabulary != strong_vocabulary:
        raise ConfigError(
            f"train.distillation.model is {distillation.model}, whose vocab_size is {strong_vocabulary}, and that of "
            f"{config.policy_model.model_name_or_path} is {vocabulary}: with train.distillation.kl={distillation.kl} "
            "all their tokens are compared. Set train.distillation.top_k, such as to 100."
        )


def _use_liger(model: PreTrainedModel) -> None:
    """Replace layers of a model by Liger's. transformers' own option would reach the trained model alone, not the
    reference, and would replace the model's forward pass by one with Liger's cross-entropy, which gives no log-probs.

    Raises:
        ConfigError: if Liger is not installed, or does not know the model, which it only logs.
    """

    def replaced() -> int:
        return sum("forward" in vars(module) for module in model.modules())

    before = replaced()
    try:
        apply_liger_kernel(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})
    except ImportError as error:
        raise ConfigError(f"train.use_liger_kernel is true, but {error}") from error
    if replaced() == before:
        raise ConfigError(
            f"train.use_liger_kernel is true, but Liger has no kernels for {model.config.model_type}: set it to false."
        )
