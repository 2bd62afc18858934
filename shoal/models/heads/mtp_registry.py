"""The families of MTP heads. No torch."""

from __future__ import annotations

from shoal.models.heads import deepseek_mtp, ernie_mtp, nemotron_mtp, qwen_mtp
from shoal.models.heads.mtp_family import MtpFamily

FAMILIES = (qwen_mtp.FAMILY, deepseek_mtp.FAMILY, nemotron_mtp.FAMILY, ernie_mtp.FAMILY)
BY_ARCHITECTURE: dict[str, MtpFamily] = {name: family for family in FAMILIES for name in family.architectures}
