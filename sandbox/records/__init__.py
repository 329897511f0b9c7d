"""What runs leave: records and the store that keeps them, tables, comparisons, and figures as files. No torch.

``report`` is imported by itself: it needs matplotlib, which a worker can do without.
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
