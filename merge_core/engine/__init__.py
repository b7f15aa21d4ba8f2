"""Execute the plan of a merge: compute and write tensors in parallel, with any number of processes, resumably."""

from mergegate.merge_core.engine.blocks import BufferPool, JobInputs, block_size, read_ahead
from mergegate.merge_core.engine.devices import EngineSettings, has_cuda_driver
from mergegate.merge_core.engine.engine import MergeRecord, merge_weights, start_or_resume
from mergegate.merge_core.engine.execution import HELD_BYTES, RETAINED_BYTES, require_prepared
from mergegate.merge_core.engine.health import count_infinite, count_non_finite
from mergegate.merge_core.engine.in_memory import merge_tensors
from mergegate.merge_core.engine.input_files import InputFiles
from mergegate.merge_core.engine.transplant import TransplantSettings, transplant_tokenizer
from mergegate.merge_core.engine.writer import WAITING_BYTES
