export function view(place) { place.append("soon"); return { stop() {} }; }
