"""The name that the wheel had in version 0.1: `tutor_rollouts.…` forwards to `classroom_rl.…`."""

from classroom_rl.former_names import forward

forward()
