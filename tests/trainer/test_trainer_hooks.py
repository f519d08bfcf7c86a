"""The private methods of transformers that this project overrides still have the signatures it was written for, and
there are no others."""

import importlib
import inspect
import pkgutil

import pytest
import transformers
from transformers import Trainer

import classroom_rl.trainer
from classroom_rl.trainer.trainer_hooks import CHECKED_AGAINST, SIGNATURES

OWN = "classroom_rl."


def test_the_installed_version_is_the_one_that_was_checked():
    """With another version read the changes of these methods, and then write its number down."""
    assert {"transformers": transformers.__version__} == CHECKED_AGAINST


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_method_takes_what_it_took(name):
    assert tuple(inspect.signature(getattr(Trainer, name)).parameters) == ("self", *SIGNATURES[name])


def private_overrides(each: type) -> set[str]:
    """The methods of a class that begin with an underscore and stand in a library's class that it is made from."""
    library = [base for base in each.__mro__[1:] if not base.__module__.startswith(OWN)]
    return {
        name
        for name, method in vars(each).items()
        if name.startswith("_") and not name.endswith("__") and callable(method)
        if any(name in vars(base) for base in library)
    }


def test_no_class_overrides_another_private_method_of_a_library():
    by_class = {}
    for module in pkgutil.walk_packages(classroom_rl.trainer.__path__, "classroom_rl.trainer."):
        for name, member in vars(importlib.import_module(module.name)).items():
            if inspect.isclass(member) and member.__module__ == module.name:
                by_class[f"{module.name}.{name}"] = private_overrides(member)
    assert by_class.pop("classroom_rl.trainer.trainer_hooks.AtomicCheckpoints") == set(SIGNATURES)
    assert by_class["classroom_rl.trainer.loop.TrainingLoop"] == set()
    assert not {name: overrides for name, overrides in by_class.items() if overrides}
