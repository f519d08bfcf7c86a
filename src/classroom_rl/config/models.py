"""Schema of models: what fills a role, on an engine here or behind an API."""

from dataclasses import field
from typing import Annotated, Any

from classroom_rl.config.fields import (
    ContextLength,
    Count,
    FilePath,
    Flag,
    ModelPath,
    Number,
    Range,
    Seconds,
    Share,
    Text,
    Weight,
    Whole,
    at_least,
    config_group,
)
from classroom_rl.config.values import ABSOLUTE, AdapterBias, EngineDtype, JudgeMode, ResponseFormat


@config_group
class VllmConfig:
    """One vLLM engine: how it is loaded, and how it samples. Keep `top_k` −1 and `top_p` 1 in `teacher_model`: only
    then is what is sampled the full softmax, the distribution that GRPO trains."""

    temperature: Annotated[Number, at_least(0, 100)] = 0.9
    """Of sampling; 0 always takes the likeliest token. The teacher of a training needs one above 0, or all
    conversations of a group would be the same."""
    top_k: Annotated[Whole, at_least(1, 10**6, "it is at least 1, or -1 for no limit", also=-1)] = -1
    """How many of the likeliest tokens are sampled from. Never sent to an API."""
    top_p: Annotated[Number, Range(0, 1, "it is above 0 and at most 1", open_below=True)] = 1.0
    """Only the likeliest tokens that together have this probability are sampled from; 1 is all of them."""
    max_length: ContextLength = 8192
    """The context in tokens, of prompt and answer together (vLLM's `max_model_len`)."""
    max_num_seqs: Count = 256
    """The most messages that a copy of the model works on at a time. Further ones wait."""
    gpu_memory_utilization: (
        Annotated[
            Number,
            Range(
                0,
                1,
                "it is the share of the GPU's memory that the engine may take, above 0 and at most 1",
                open_below=True,
            ),
        ]
        | None
    ) = None
    """For weights, activations and KV cache. The shares of engines on the same GPU that are awake together must add up
    to less than 1. Null: planned."""
    number_of_gpus_per_instance: Annotated[Whole, at_least(1, 1024)] = 1
    """How many GPUs the model is split over (vLLM's tensor-parallel size)."""
    data_parallel_size: Annotated[Whole, at_least(1, 1024)] | None = None
    """How many copies of the model share its requests. Null: one on CPUs, on GPUs as many as have room."""
    gpus: list[Annotated[Whole, at_least(0, 1023)]] | None = None
    """The engine's GPUs, counted from 0 among those that the server sees. Null: planned."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's `AsyncEngineArgs`, such as {kv_cache_dtype: fp8}. Those that this project sets are
    refused."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the model's chat template, such as {enable_thinking: false} for Qwen3. An API gets them, too, as
    vLLM's and SGLang's servers take them."""

    @property
    def gpu_share(self) -> float:
        """The share of the GPU that the engine takes: half of it where nothing is configured or planned."""
        return 0.5 if self.gpu_memory_utilization is None else self.gpu_memory_utilization

    enforce_eager: Flag = False
    """Whether vLLM neither compiles the model nor captures CUDA graphs: it starts faster and generates more slowly."""
    dtype: EngineDtype = "auto"
    """Of weights and arithmetic. `auto` is that of the model's files, or one of 16 bits if they are in float32."""
    cpu_kvcache_gib: Count = 1
    """Size of the KV cache in GiB, on CPUs only."""
    cpu_cores: Text | None = None
    """The cores that the engine runs on, such as "0" or "0-3", on CPUs only; null leaves them to vLLM. With cores of
    its own, an engine has one process instead of two that wait for each other in a busy loop."""


@config_group
class LoraConfig:
    """A LoRA adapter that is trained instead of the model's own weights (Hu et al., "LoRA", 2021). A weight W becomes W
    + `alpha` / `rank` × B·A, where only A and B are trained."""

    enable: Flag = False
    """Whether an adapter is trained."""
    rank: Count = 16
    """Rows of A and columns of B: how much the adapter can learn. vLLM serves at most 512, so that is a teacher's
    limit."""
    alpha: Count = 32
    """How strongly the adapter changes a weight, see the formula."""
    target_modules: Any = "all-linear"
    """Which layers get one: `all-linear` (all linear layers except the output head), or a list of module names such as
    [q_proj, v_proj]."""
    dropout: Annotated[Number, Range(0, 1, "it is a share of at least 0 and below 1", open_above=True)] = 0.01
    """Share of A's inputs that a training step drops."""
    bias: AdapterBias = "none"
    """Which biases of the model are trained, too; `lora_only` means those of the target modules. vLLM serves no
    adapters with biases, so a teacher's is `none`."""


@config_group
class ModelConfig:
    """Which model it is, and the options of its engine."""

    model_name_or_path: ModelPath = "Qwen/Qwen2.5-7B-Instruct"
    """A Hub name or a local folder; of a model behind an API its name there. A judge and a supervisor may also be
    embedded."""
    vllm: VllmConfig = field(default_factory=VllmConfig)

    @property
    def adapter(self) -> LoraConfig | None:
        """The adapter that the model is served with; None if it has none."""
        return None

    @property
    def is_remote(self) -> bool:
        """Whether the model is behind an API."""
        return False


@config_group
class ApiAccessConfig:
    """How an OpenAI-compatible API is reached. A model is behind one if `use_openrouter`, `use_gemini` or `base_url` is
    set."""

    use_openrouter: Flag = False
    """The API is OpenRouter, with its key in OPENROUTER_API_KEY."""
    use_gemini: Flag = False
    """The API is Gemini's OpenAI-compatible endpoint, with its key in GEMINI_API_KEY."""
    base_url: Text | None = None
    """The address of another API, such as http://127.0.0.1:8000/v1. It goes before those of OpenRouter and Gemini."""
    api_key_env: Text | None = None
    """The environment variable that holds the API's key. Null: the one of OpenRouter or Gemini; with `base_url` alone,
    requests carry no key."""

    @property
    def is_remote(self) -> bool:
        """Whether the model is behind an API."""
        return self.use_openrouter or self.use_gemini or self.base_url is not None


@config_group
class ApiModelConfig(ApiAccessConfig, ModelConfig):
    """A model on a vLLM engine, or behind an OpenAI-compatible API if `use_openrouter`, `use_gemini` or `base_url` is
    set. An API also gets `temperature` and `top_p` of the block `vllm`; of the keys for APIs, an engine reads
    `response_format` alone.

    Costs are in US dollars: as the provider reports them, otherwise tokens × prices.
    """

    fallback_models: list[Text] = field(default_factory=list)
    """Models of the same API, in order. When one does not answer, or the API does not know it, the next one is
    asked."""
    response_format: ResponseFormat = "auto"
    """`json_schema` asks for answers by schema, `text` leaves their shape to the prompt, `auto` tries the schema and
    falls back to text for a model that refuses it. An engine samples a judge's and a supervisor's answers under the
    schema, unless it is `text`."""
    max_concurrent_requests: Count = 64
    """The most requests that wait for their answer at a time."""
    requests_per_minute: Count | None = None
    """The most requests that begin in a minute; null: no limit."""
    tokens_per_minute: Annotated[Whole, at_least(1, 10**9)] | None = None
    """The most tokens in a minute, of prompt and answer together; null: no limit."""
    request_timeout_s: Seconds = 120.0
    """How long a request may take, in seconds. Then it is repeated."""
    deadline_s: Seconds = 1800.0
    """If the model answers nothing for so many seconds, the run stops. Less than `generation.sample_timeout_s`."""
    usd_per_million_prompt_tokens: Weight = 0.0
    """The price; with `fallback_models`, that of the most expensive model."""
    usd_per_million_completion_tokens: Weight = 0.0
    """The same, for the tokens of answers."""
    max_cost_usd: Annotated[Number, at_least(0, 10**9)] | None = None
    """Cap on the spending of the run, across restarts; null: none. It needs both prices, because each request's worst
    case is reserved before it is sent."""


@config_group
class TeacherModelConfig(ApiModelConfig):
    """The trained model. It must be an engine of the server, not a model behind an API. With `lora.enable` its own
    weights stay fixed and an adapter is trained: only the adapter is published, and the reference for `train.beta` is
    the model without it."""

    lora: LoraConfig = field(default_factory=LoraConfig)
    load_in_4bit: Flag = False
    """Whether the adapter of `lora.enable` is trained over weights of 4 bits (QLoRA: bitsandbytes' NF4 with double
    quantisation), which take a quarter of the trainer's memory for them. The engine serves the same rounded weights in
    16 bits, from a folder that the server writes into the run folder, as large as the model."""

    @property
    def adapter(self) -> LoraConfig | None:
        return self.lora if self.lora.enable else None


@config_group
class JudgeModelConfig(ApiModelConfig):
    """The judge (docs/classroom.md). `model_name_or_path: rubric` is the embedded rubric of the quickstart's
    closed-grammar lessons, `rules` the embedded judge of lesson plans in any language."""

    replies_per_attempt: Annotated[Whole, at_least(1, 1000)] = 3
    """How many replies one judge attempt may use until one holds a verdict."""
    max_failed_share: Share = 0.2
    """The step stops if more than this share of a batch's conversations have no verdict, or content that the judge
    refused."""
    mode: JudgeMode = ABSOLUTE
    """`absolute` judges each conversation by itself. `group` has one call rank and score all conversations of a group
    by a rule that scores, which costs less. It is for a training's judge that is a model, and for `schedule:
    concurrent`."""
    anchor_share: Share = 0.03
    """With `mode: group`, so many of the conversations are also judged by themselves, to compare the two. These
    verdicts change no reward."""
    rubric: FilePath | None = None
    """A YAML file with criteria of your own, a list of {name, question, weight, anchors: {score: text}}, by which a
    judge model scores in place of the three built-in ones. The score is Σ weight × share of the scale / Σ of the
    positive weights, cut to [0, 1]; an answer that lacks a criterion is no verdict. Null: none."""
    rubric_prompt_path: FilePath = "prompt_templates/judges/rubric.txt"
    """The template that asks by `rubric`, in place of that of the rule that scores."""
    group_prompts_paths: dict[str, FilePath] = field(
        default_factory=lambda: {"pedagogical_eval": "prompt_templates/judges/language_tutor_group.txt"}
    )
    """The templates of `mode: group`, by rule."""


@config_group
class SupervisorModelConfig(ApiModelConfig):
    """The supervisor (docs/supervision.md). `model_name_or_path: rubric` is the rubric of the quickstart's
    closed-grammar lessons, `rules` the rules for lesson plans in any language and for maths problems."""

    replies_per_review: Annotated[Whole, at_least(1, 1000)] = 2
    """How many replies one review may use until one can be read."""
