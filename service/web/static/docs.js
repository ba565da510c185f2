// Swagger UI over the service's own document. The paths in it are of the service; behind a proxy's prefix they begin
// where this page lies.
"use strict";
addEventListener("DOMContentLoaded", async () => {
  const document_ = await (await fetch("openapi.json")).json();
  document_.servers = [{ url: new URL(".", location.href).pathname.replace(/\/$/, "") || "/" }];
  SwaggerUIBundle({
    spec: document_,
    dom_id: "#swagger-ui",
    layout: "BaseLayout",
    deepLinking: true,
    showExtensions: true,
    showCommonExtensions: true,
    presets: [SwaggerUIBundle.presets.apis, SwaggerUIBundle.SwaggerUIStandalonePreset],
  });
});
