"""The overhead of measuring the gradient noise scale: the same training with `log.noise_scale` on and off.

Contenders, clock and threshold are those of phase_timing.py: two runs of one recipe in the same ranks, which alternate
by log windows; the median ratio of the times of consecutive windows, on over off, is at most 1.01. In a window of 50
steps 5 are measured. On one rank, as on a machine with one GPU, give the recipe micro-batches.

    python benchmarks/noise_scale.py
    python benchmarks/noise_scale.py --ranks 1 --recipe nbody/short_opt --set data.source=device --set batch.micro=32
"""

import phase_timing

if __name__ == "__main__":
    phase_timing.compare(__file__, __doc__, "noise_scale", phase_timing.DEFAULT)
