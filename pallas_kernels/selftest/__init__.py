"""Tests the kernels that a model will use, at its own shapes, on this machine's device, against XLA in float32.

    shapes     the shapes with which a model calls the kernels
    batches    ragged batches: pages in any order, NaN in every place that no sequence owns
    case       a call that is compared, and how far its result may be off
    cases      such calls of each operation
    second_opinion   what JAX's own kernel for TPUs makes of a batch on which ours was wrong
    report     what the testing process says, line by line
    __main__   that process: `python -m pallas_kernels.selftest`, a request on standard input, the report on its output

Says before each operation what it is about to run, so that whoever watches the process can name a kernel that crashes
it or never returns. Run by `jaxsgl.engine`; checks and benchmarks take their batches from here.
"""
