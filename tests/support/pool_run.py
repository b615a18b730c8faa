"""Random operations on a PoolWorld, as many as asked for, from one seed."""

from __future__ import annotations

import random

from tests.support.fake_vmm import FakeVmmDriver, Status
from tests.support.pool_world import FRAME_BYTES, WIDTHS, PoolWorld, limits_of

MODELS = sorted(WIDTHS)
FAILURES = {"cuMemMap": Status.OUT_OF_MEMORY, "cuMemSetAccess": Status.UNKNOWN, "cuMemUnmap": Status.UNKNOWN}


def unlucky_driver(rng: random.Random, chance: float) -> FakeVmmDriver:
    """A driver of which that part of maps, access settings and unmaps fails."""

    def fails(name: str) -> Status:
        return FAILURES[name] if name in FAILURES and rng.random() < chance else Status.SUCCESS

    return FakeVmmDriver(FRAME_BYTES, fails)


def random_run(world: PoolWorld, rng: random.Random, num_operations: int, check_every: int = 1) -> None:
    """Admit, grow, finish, abort, step, limit, evict, replace and look ahead; then end everything."""
    next_step = 1
    for number in range(num_operations):
        alive = [key for key, sequence in world.live.items() if not sequence.has_ended]
        growing = [key for key in alive if world.can_grow(key)]
        match rng.randrange(20):
            case 0 | 1 | 2 | 3:
                world.admit(rng.choice(MODELS), rng.randint(1, 3), rng.randint(0, 6), rng.random())
            case 4 | 5 | 6 | 7 | 8 | 9 | 10 if growing:
                world.grow(rng.choice(growing))
            case 11 | 12 | 13 if alive:
                world.end(rng.choice(alive))
            case 14 if alive and len(world.steps) < 4:
                world.begin_step(next_step, set(rng.sample(alive, rng.randint(1, min(3, len(alive))))))
                next_step += 1
            case 15 | 16 if world.steps:
                world.end_step(rng.choice(list(world.steps)))
            case 17:
                ceiling = None if rng.random() < 0.5 else rng.random()
                limits = limits_of(world, rng.uniform(0.3, 1.0), rng.choice(MODELS), rng.uniform(0.0, 0.2), ceiling)
                world.set_limits(limits)
            case 18:
                model = rng.choice(MODELS)
                if rng.random() < 0.05 and not any(sequence.model == model for sequence in world.live.values()):
                    world.replace_model(model)
                else:
                    world.evict(model)
            case 19:
                world.look_ahead(rng.choice((0.0, 0.5, 3.0)))
            case _:
                pass
        if number % check_every == 0:
            world.check()
    world.finish_all()
