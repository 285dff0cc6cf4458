"""What is wrong with a training set-up: `doctor` at rest, `watch` over some steps, `first_nonfinite` in them."""

from halfstep.integrations.doctor.findings import Diagnosis, Finding
from halfstep.integrations.doctor.nonfinite import NonFinite, first_nonfinite
from halfstep.integrations.doctor.rules import doctor
from halfstep.integrations.doctor.watching import watch

__all__ = ["Diagnosis", "Finding", "NonFinite", "doctor", "first_nonfinite", "watch"]
