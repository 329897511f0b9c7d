"""What runs leave: records, the store that keeps them, tables, comparisons, and figures as files. No torch.

``report`` is not in the face, since it needs matplotlib and workers do not.
"""

from .comparison import best, compare, summarize
from .record import RunRecord
from .store import Store, load_records, save_records
from .tables import arms, curves, table

__all__ = [
    "RunRecord",
    "Store",
    "arms",
    "best",
    "compare",
    "curves",
    "load_records",
    "save_records",
    "summarize",
    "table",
]
