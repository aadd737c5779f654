"""All faults in one table, by the name that follows `faulty_kernels:`."""

from faulty_addressing import ADDRESSING
from faulty_algebra import ALGEBRA
from faulty_decay import DECAY
from faulty_memory import MEMORY
from faulty_model import Fault
from faulty_rounding import ROUNDING

FAULTS: dict[str, Fault] = {**ALGEBRA, **DECAY, **ADDRESSING, **ROUNDING, **MEMORY}
