# Adjustments that the OpenAPI document cannot express.
import schemathesis

# statuses that the document describes with a body, which a denial with a custom status does not have
DESCRIBED = {400, 401, 403, 429}


@schemathesis.hook
def before_call(context, case, kwargs):
    """A denial with the status of an error cannot be distinguished from that error: use another status."""
    status = str((case.query or {}).get("deny_status"))
    if status in {str(number) for number in [*DESCRIBED, *range(500, 600)]}:
        case.query["deny_status"] = 418
