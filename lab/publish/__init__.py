"""The stored results: how one is kept, shown, and written into the pages. For who reads or
publishes a result; nothing here measures."""
import lab.engine  # noqa: F401  before torch: it says how threads wait
import mitigations  # noqa: F401  fills the lists of choices before a page is written
