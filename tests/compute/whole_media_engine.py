"""An engine process in which DeepSeek-V2 is of a family whose matches never end inside media."""

from __future__ import annotations

from omni_flow.compute.prefix import not_inside_media
from omni_flow.compute.sglang import worker
from omni_flow.models import families

if __name__ == "__main__":
    families._FAMILIES["deepseek_v2"] = families._FAMILIES["deepseek_v2"]._replace(rule=not_inside_media)
    worker.main()
