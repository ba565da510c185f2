"""The same issuer with codes for devices (RFC 8628) and ID tokens at each refresh: Authlib's own, which Canaille is
made with and does not switch on.
"""

from __future__ import annotations

import json
from typing import Any

from authlib.oauth2.rfc8628 import DeviceAuthorizationEndpoint, DeviceCodeGrant, DeviceCredentialDict
from authlib.oidc.core.grants.code import OpenIDToken
from canaille.app import models
from canaille.app.flask import csrf
from canaille.backends import Backend
from canaille.oidc.provider import OIDCGrantMixin, RefreshTokenGrant, authorization
from canaille.oidc.userinfo import UserInfo, generate_user_claims
from flask import Response

from tests.service.issuer import TestIssuer


class _IDToken(OIDCGrantMixin, OpenIDToken):  # type: ignore[misc]
    def generate_user_info(self, user: Any, scope: str) -> Any:
        return UserInfo(generate_user_claims(user)).filter(scope)


class Devices:
    """Their codes, and who has confirmed them: whom the issuer's page would ask. interval: seconds, of polling."""

    def __init__(self, real: TestIssuer, interval: float = 0.2) -> None:
        self.waiting: dict[str, DeviceCredentialDict] = {}
        self.granted: dict[str, tuple[str, bool]] = {}
        devices = self

        class Endpoint(DeviceAuthorizationEndpoint):  # type: ignore[misc]
            INTERVAL = interval

            def get_verification_uri(self) -> str:
                return f"{real.url}/device"

            def save_device_credential(self, client_id: str, scope: str, data: dict[str, Any]) -> None:
                kept = DeviceCredentialDict(client_id=client_id, scope=scope, **data)
                devices.waiting[data["device_code"]] = kept

        class Grant(DeviceCodeGrant):  # type: ignore[misc]
            def query_device_credential(self, device_code: str) -> Any:
                return devices.waiting.get(device_code)

            def query_user_grant(self, user_code: str) -> Any:
                if user_code not in devices.granted:
                    return None
                name, allowed = devices.granted[user_code]
                return Backend.instance.get(models.User, user_name=name), allowed

            def should_slow_down(self, credential: Any) -> bool:
                return False

        def ask() -> Response:
            answer: Response = authorization.create_endpoint_response(Endpoint.ENDPOINT_NAME)
            return answer

        def told(answer: Response) -> Response:
            said = answer.get_json(silent=True)
            if isinstance(said, dict) and "jwks_uri" in said:
                answer.set_data(json.dumps({**said, "device_authorization_endpoint": f"{real.url}/oauth/device"}))
            return answer

        real.app.after_request(told)
        real.app.add_url_rule("/oauth/device", "device", csrf.exempt(ask), methods=["POST"])
        authorization.register_endpoint(Endpoint)
        authorization.register_grant(Grant, [_IDToken()])
        authorization._token_grants[:] = [one for one in authorization._token_grants if one[0] is not RefreshTokenGrant]
        authorization.register_grant(RefreshTokenGrant, [_IDToken()])

    def grants(self, client_id: str, real: TestIssuer) -> None:
        """Let this client have them."""
        with real.app.app_context():
            one = Backend.instance.get(models.Client, client_id=client_id)
            one.grant_types = [*one.grant_types, DeviceCodeGrant.GRANT_TYPE]
            Backend.instance.save(one)
