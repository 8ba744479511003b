"""Probes that answer what the notes of an earlier experiment asked or claimed: each claim has its
command here (../claims.md)."""
import engine  # noqa: F401  before torch: it says how threads wait
import mitigations  # noqa: F401  fills the lists of choices before a probe reads them
