"""The launcher of Kubernetes: each attempt of a job is a RayJob, which KubeRay turns into a Ray cluster of its own."""
