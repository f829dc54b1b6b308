# What Schemathesis cannot see in the document.
import schemathesis

# described with a body, which a refusal under another status does not have
DESCRIBED = {400, 401, 403, 429}


@schemathesis.hook
def before_call(context, case, kwargs):
    """A refusal with the status of some trouble looks like that trouble: another one is asked for."""
    status = str((case.query or {}).get("deny_status"))
    if status in {str(number) for number in [*DESCRIBED, *range(500, 600)]}:
        case.query["deny_status"] = 418
