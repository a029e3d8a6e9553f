"""Other processors, as numba, torch and oneDNN are told to take this one for: it without what those
have not."""

from collections.abc import Mapping

_CASCADELAKE = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512vnni"}
_WIDE = {
    "haswell": set(),
    "cascadelake": _CASCADELAKE,
    "sapphirerapids": None,
}  # what is AVX-512; None: all of it
_LIBRARIES = {
    "haswell": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "cascadelake": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
}


def as_processor(environment: Mapping[str, str]) -> dict[str, str]:
    """What a process needs in its environment besides `NUMBA_CPU_NAME` to compute as that
    processor: the name alone leaves numba the features of this one. Nothing where features are
    given, too, or the name is not known here."""
    name = environment.get("NUMBA_CPU_NAME", "")
    if name not in _WIDE or "NUMBA_CPU_FEATURES" in environment:
        return {}
    from llvmlite import binding

    features = binding.get_host_cpu_features()
    kept = _WIDE[name]
    for feature in features:
        if feature.startswith("avx512") and kept is not None and feature not in kept:
            features[feature] = False
    return {"NUMBA_CPU_FEATURES": features.flatten()} | _LIBRARIES.get(name, {})
