"""What Ray Train 2.60 has inside, where workers/elastic takes hold of it. Read before another version is allowed."""

import dataclasses
import importlib
import inspect

import pytest

pytest.importorskip("ray")

CHANGED = "Ray Train has changed inside: read what it does there now, mend workers/elastic, and only then this test"
V2 = "ray.train.v2._internal"
GROUP = f"{V2}.execution.worker_group"
SIGNATURES = {
    f"{GROUP}.worker_group:WorkerGroup": {
        "__init__": ["self", "train_run_context", "worker_group_context", "callbacks"],
        "create": ["train_run_context", "worker_group_context", "callbacks"],
        "_start": ["self"],
        "poll_status": ["self", "timeout"],
        "_poll_workers_and_collect_errors": ["self", "timeout"],
        "_init_train_context": ["self", "workers", "sync_actor"],
        "_get_worker_runtime_env": ["custom_runtime_env"],
        "_assert_inactive": ["self"],
        "shutdown": ["self"],
        "abort": ["self"],
    },
    f"{GROUP}.worker:RayTrainWorker": {
        "__init__": ["self"],
        "run_train_fn": ["self", "train_fn_ref"],
        "poll_status": ["self"],
        "get_metadata": ["self"],
    },
    f"{GROUP}.execution_group:ReplicaGroup": {"__init__": ["self", "workers", "resources_per_worker", "callbacks"]},
    f"{GROUP}.state": {"_shutdown_workers": ["workers", "patience_s"]},
    f"{V2}.execution.checkpoint.report_handler:ReportCallbackHandler": {
        "after_worker_group_start": ["self", "worker_group"]
    },
    f"{V2}.callbacks.state_manager:StateManagerCallback": {
        "__init__": ["self", "datasets"],
        "after_worker_group_start": ["self", "worker_group"],
    },
    f"{V2}.execution.scaling_policy.fixed:FixedScalingPolicy": {
        "__init__": ["self", "scaling_config"],
        "after_controller_start": ["self", "train_run_context"],
        "before_controller_shutdown": ["self"],
        "before_controller_abort": ["self"],
        "_maybe_send_resource_request": ["self"],
    },
    "ray.train.v2.api.data_parallel_trainer:DataParallelTrainer": {
        "_get_train_func": ["self"],
        "_create_default_callbacks": ["self"],
        "_initialize_and_run_controller": ["self", "controller_init_kwargs"],
    },
    "ray._private.state:state": {"get_draining_nodes": []},
}
FIELDS = {
    f"{GROUP}.state:WorkerGroupState": ["start_time", "placement_group_handle", "workers", "sync_actor"],
    f"{GROUP}.poll:WorkerStatus": ["running", "error", "training_report", "return_value", "preemption_info"],
    f"{GROUP}.poll:WorkerGroupPollStatus": ["worker_statuses", "worker_rank_to_replica_group_rank"],
    f"{V2}.execution.context:DistributedContext": [
        *("world_rank", "world_size", "local_rank", "local_world_size", "node_rank")
    ],
    f"{V2}.execution.context:ExecutionContext": [
        *("synchronization_actor", "result_queue", "training_thread_runner", "train_context_callbacks")
    ],
    f"{GROUP}.worker:Worker": [
        *("actor", "metadata", "resources", "distributed_context", "log_file_path", "placement_group_bundle_index")
    ],
}
WRITTEN = {  # what the source of a class must still say
    f"{V2}.execution.controller.controller:TrainController": [
        "worker_group_cls = WorkerGroup",
        "self.worker_group_cls.create(",
        "isinstance(e, TrainingFailedError)",
        "ENABLE_PREEMPTION_WATCHER_ENV_VAR",
    ],
    f"{GROUP}.worker_group:WorkerGroup": [
        *("self._world_rank_to_ongoing_poll", "self._replica_group_callbacks", "self._worker_group_context"),
        *("self._worker_group_state", "self._latest_poll_status", "self._train_run_context", "self._callbacks"),
    ],
    f"{GROUP}.thread_runner:ThreadRunner": ["TrainingThread("],
    f"{V2}.callbacks.state_manager:StateManagerCallback": ["self._state_manager", "self._run_id"],
}
EXIST = [
    f"{V2}.callbacks:DatasetsCallback",
    f"{V2}.callbacks.placement_group_callback:PlacementGroupCleanerCallback",
    f"{V2}.execution.worker_group.placement_group_handle:PlacementGroupHandle",
    f"{V2}.exceptions:WorkerGroupStartupFailedError",
    f"{V2}.util:bundle_to_remote_args",
    f"{V2}.util:invoke_context_managers",
]


def found(path):
    """The object at module:name."""
    module, _, name = path.partition(":")
    try:
        there = importlib.import_module(module)
        return getattr(there, name) if name else there
    except (ImportError, AttributeError) as error:
        pytest.fail(f"{path} is gone ({error}). {CHANGED}")


@pytest.mark.parametrize("owner", SIGNATURES)
def test_what_is_overridden_or_called_has_the_same_arguments(owner):
    for name, expected in SIGNATURES[owner].items():
        function = getattr(found(owner), name, None)
        assert function is not None, f"{owner}.{name} is gone. {CHANGED}"
        assert list(inspect.signature(function).parameters) == expected, f"{owner}.{name}: {CHANGED}"


@pytest.mark.parametrize("owner", FIELDS)
def test_records_have_the_same_fields(owner):
    assert [field.name for field in dataclasses.fields(found(owner))] == FIELDS[owner], f"{owner}: {CHANGED}"


@pytest.mark.parametrize("owner", WRITTEN)
def test_attributes_that_are_read_or_set_are_still_used(owner):
    source = inspect.getsource(found(owner))
    assert [words for words in WRITTEN[owner] if words not in source] == [], f"{owner}: {CHANGED}"


@pytest.mark.parametrize("path", EXIST)
def test_what_is_imported_exists(path):
    assert found(path) is not None


def test_this_is_the_version_that_was_read():
    import ray
    from ray.train.v2._internal import constants

    assert ray.__version__.startswith("2.60."), f"ray {ray.__version__}: {CHANGED}"
    assert constants.ENABLE_PREEMPTION_WATCHER_ENV_VAR == "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", CHANGED
