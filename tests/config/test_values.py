"""The names on offer are those that the libraries accept."""

from typing import get_args

from classroom_rl.config import values


def test_the_names_on_offer_are_those_of_the_libraries():
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
    from transformers.trainer_utils import SchedulerType
    from transformers.training_args import OptimizerNames
    from trl import GRPOConfig
    from vllm.config.model import ModelDType

    from classroom_rl.trainer.losses import POLICY_LOSSES

    assert set(get_args(values.Optimizer)) <= {name.value for name in OptimizerNames}
    assert set(get_args(values.Scheduler)) <= {name.value for name in SchedulerType}
    assert set(get_args(values.Tracker)) == set(INTEGRATION_TO_CALLBACK)
    assert set(get_args(values.EngineDtype)) <= set(get_args(ModelDType))
    assert get_args(values.LossType) == tuple(POLICY_LOSSES)
    shipped = GRPOConfig.__dataclass_fields__
    assert shipped["loss_type"].default in get_args(values.LossType)
    assert shipped["vllm_importance_sampling_mode"].default in get_args(values.ImportanceSamplingMode)
