"""The names on offer are those that the libraries accept."""

from typing import get_args

from classroom_rl.config import values


def test_the_names_on_offer_are_those_of_the_libraries():
    import inspect

    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
    from transformers.trainer_utils import SchedulerType
    from transformers.training_args import OptimizerNames
    from trl import GRPOConfig, GRPOTrainer
    from vllm.config.model import ModelDType

    assert set(get_args(values.Optimizer)) <= {name.value for name in OptimizerNames}
    assert set(get_args(values.Scheduler)) <= {name.value for name in SchedulerType}
    assert set(get_args(values.Tracker)) == set(INTEGRATION_TO_CALLBACK)
    assert set(get_args(values.EngineDtype)) <= set(get_args(ModelDType))
    loss = inspect.getsource(GRPOTrainer._compute_loss)
    sampled = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    assert all(f'"{name}"' in loss for name in get_args(values.LossType))
    modes, scales = get_args(values.ImportanceSamplingMode), get_args(values.RewardScale)
    assert all(f'"{name}"' in sampled for name in (*modes, *scales))
    shipped = GRPOConfig.__dataclass_fields__
    assert shipped["loss_type"].default in get_args(values.LossType)
    assert shipped["vllm_importance_sampling_mode"].default in modes
