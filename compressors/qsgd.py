"""QSGD: stochastic rounding to a few levels.

Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding" (NeurIPS
2017). Section 3.1 scales by the 2-norm; section 4 ("practical variants", used in all of its
experiments) by the largest magnitude of each bucket of consecutive values, with codes of a fixed
length. Elias coding is left out: its size depends on the data.
"""

from __future__ import annotations

from compressors.levels import Levels
from compressors.quantizer import Quantizer


class QSGD(Quantizer):
    """CF 16, 32/3, 8, ..., 4: b = 2 to 8 bits a value, a sign and 2**(b - 1) - 1 levels.

    norm: "max" (section 4) or "l2" (section 3.1; larger steps, for the theory).
    bucket: values that share a scale, a power of two.
    seed: of the random numbers. They also depend on the tensor's name, the step and the data, so
        ranks that share a seed round independently unless their data is the same.
    error_feedback: the mean error is zero, so by default it is not fed back. Feeding it back
        converges if C is a contraction, for which a bucket of n values needs s levels with
        s**2 > (n - 1) / 8 ("max") or s**2 > n ("l2", Lemma 3.1); with True only the bit counts that
        meet this are used: 5 bits and more for buckets of 512, 3 and more for 64.
    """

    name = "qsgd"

    def __init__(
        self,
        norm: str = "max",
        bucket: int = 512,
        seed: int = 0,
        error_feedback: bool = False,
    ) -> None:
        self.norm, self.bucket, self.seed = norm, bucket, seed
        self.error_feedback = error_feedback
        forms = [Levels(self.name, bits, bucket, norm, seed) for bits in range(2, 9)]
        if error_feedback:
            forms = [form for form in forms if contracts(form)]
        if not forms:
            raise ValueError(f"bucket must be smaller for error_feedback=True, got {bucket}")
        super().__init__({32 / form.bits: form for form in forms})


def contracts(form: Levels) -> bool:
    """Whether E||x - C(x)||^2 < ||x||^2 for every x.

    In units of the scale, a value of magnitude e < 1 loses e - e^2 on average while it holds e^2;
    the largest value holds s^2. At worst (e = 1/4) the other n - 1 together lose (n - 1) / 8 more
    than they hold.
    """
    worst = form.bucket if form.norm == "l2" else (form.bucket - 1) / 8
    return form.levels**2 > worst
