"""The paper's tables and figures, one file each."""

from raptr.studies.boolean import BOOLEAN
from raptr.studies.contract import Study, conduct, stoppable
from raptr.studies.findings import findings_table
from raptr.studies.linear import LINEAR
from raptr.studies.polynomial import POLYNOMIAL
from raptr.studies.polynomial_length import POLYNOMIAL_LENGTH
from raptr.studies.stability import study_stability

STUDIES: dict[str, Study] = {study.name: study for study in (POLYNOMIAL, POLYNOMIAL_LENGTH, BOOLEAN, LINEAR)}

__all__ = ["STUDIES", "Study", "conduct", "findings_table", "stoppable", "study_stability"]
