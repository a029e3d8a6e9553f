"""A hardware profile by hand, in whole seconds: a layer of two experts a token takes 12 s, of which
they compute 8."""

from artifacts.hardware.profile import Compute, HardwareProfile, Load, NearCompute, Spread

CONDITIONS = {
    "device": "cpu",
    "device_name": "abacus",
    "processor": "abacus",
    "cores": 2,
    "threads": 1,
    "load": 0.5,
    "link": "disk",
    "dtype": "float32",
    "expert_bytes": 100,
    "memory_nbytes": 1 << 30,
    "context": 64,
    "turns": 4,
}


def made(*, scale: float = 1.0) -> HardwareProfile:
    """Loading takes 5 s, of which 1 s is fixed; in a run 14 s, of which 9 s are the engine's
    work."""

    def spread(seconds: float) -> Spread:
        return Spread(seconds * scale, 0.5 * scale, 4)

    return HardwareProfile(
        compute=(
            Compute(1, *map(spread, (10.0, 12.0, 3.0, 4.0))),
            Compute(16, *map(spread, (40.0, 200.0, 6.0, 16.0))),
        ),
        loads=(
            Load("disk", spread(5.0), 20.0, spread(14.0), spread(9.0), spread(1.0)),
            Load("ram", spread(1.0), 100.0),
        ),
        near=(
            NearCompute(16, 1, spread(6.0)),
            NearCompute(16, 16, spread(32.0)),
            NearCompute(4, 1, spread(2.0)),
        ),
        conditions=CONDITIONS,
    )
