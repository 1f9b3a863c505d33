"""The paper's tables and figures, one file each."""

from raptr.studies.contract import Study, conduct
from raptr.studies.findings import findings_table
from raptr.studies.registry import NAMES, STUDIES, conduct_named
from raptr.studies.stability import study_stability

__all__ = ["NAMES", "STUDIES", "Study", "conduct", "conduct_named", "findings_table", "study_stability"]
