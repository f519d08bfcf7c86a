"""The private methods of TRL and transformers that this project overrides still have the signatures it was written
for."""

import inspect

import pytest
import transformers
import trl
from transformers import Trainer
from trl import GRPOTrainer

from classroom_rl.trainer import trainer_hooks
from classroom_rl.trainer.grpo import trl_hooks
from classroom_rl.trainer.grpo.trainer import ClassroomGRPOTrainer
from classroom_rl.trainer.ppo import trl_hooks as ppo_hooks
from classroom_rl.trainer.ppo.trainer import ClassroomPPOTrainer

HOOKS = ((trl_hooks, GRPOTrainer), (ppo_hooks, GRPOTrainer), (trainer_hooks, Trainer))
METHODS = [(base, name, parameters) for module, base in HOOKS for name, parameters in module.SIGNATURES.items()]


def test_the_installed_versions_are_those_that_were_checked():
    """With another version read the changes of these methods, and then write its number down."""
    installed = {"trl": trl.__version__, "transformers": transformers.__version__}
    assert installed == trl_hooks.CHECKED_AGAINST | trainer_hooks.CHECKED_AGAINST


@pytest.mark.parametrize(("base", "name", "parameters"), METHODS, ids=[name for _, name, _ in METHODS])
def test_a_method_takes_what_it_took(base, name, parameters):
    assert tuple(inspect.signature(getattr(base, name)).parameters) == ("self", *parameters)


@pytest.mark.parametrize(("module", "base"), HOOKS)
def test_every_override_is_in_the_list(module, base):
    classes = [each for each in vars(module).values() if inspect.isclass(each) and each.__module__ == module.__name__]
    overridden = {
        name for each in classes for name in vars(each) if hasattr(base, name) and callable(getattr(base, name))
    }
    assert overridden - {"__doc__", "__init__"} <= set(module.SIGNATURES)


@pytest.mark.parametrize(("trainer", "public"), [(ClassroomGRPOTrainer, set()), (ClassroomPPOTrainer, {"save_model"})])
def test_no_other_file_overrides_what_is_private(trainer, public):
    """A trainer itself overrides nothing of TRL but its beginning, and what is public."""
    own = {name for name in vars(trainer) if hasattr(GRPOTrainer, name)} - public
    assert own - {"__doc__", "__module__", "__init__", "__qualname__", "__annotations__"} <= {
        "__abstractmethods__",
        "_abc_impl",
        "__parameters__",
        "__orig_bases__",
    }


def test_the_attributes_are_still_read_or_set_there():
    source = inspect.getsource(inspect.getmodule(GRPOTrainer))
    for name in {*trl_hooks.ATTRIBUTES, *ppo_hooks.ATTRIBUTES}:
        assert f"self.{name}" in source, name
