BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0001');
CREATE TABLE events (
	id INTEGER NOT NULL, 
	job_id VARCHAR(80) NOT NULL, 
	attempt INTEGER NOT NULL, 
	kind VARCHAR(64) NOT NULL, 
	step INTEGER NOT NULL, 
	time FLOAT NOT NULL, 
	fields JSON NOT NULL, 
	PRIMARY KEY (id), 
	CONSTRAINT events_once UNIQUE (job_id, attempt, kind, step, time), 
	FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
INSERT INTO "events" VALUES(1,'running-5b2e91',1,'job_submitting',0,1763708401.5,'{}');
INSERT INTO "events" VALUES(2,'running-5b2e91',1,'job_pending',0,1763708402.5,'{}');
INSERT INTO "events" VALUES(3,'pending-7cf5a1',1,'job_submitting',0,1763708403.0,'{}');
INSERT INTO "events" VALUES(4,'pending-7cf5a1',1,'job_pending',0,1763708404.5,'{}');
INSERT INTO "events" VALUES(5,'over-dd89f4',1,'job_submitting',0,1763708405.0,'{}');
INSERT INTO "events" VALUES(6,'over-dd89f4',1,'job_pending',0,1763708406.0,'{}');
INSERT INTO "events" VALUES(7,'failed-5d6dc5',1,'job_submitting',0,1763708406.5,'{}');
INSERT INTO "events" VALUES(8,'failed-5d6dc5',1,'job_pending',0,1763708407.5,'{}');
INSERT INTO "events" VALUES(9,'running-5b2e91',1,'job_running',0,1763708411.5,'{}');
INSERT INTO "events" VALUES(10,'running-5b2e91',1,'checkpoint_saved',2,1763708412.0,'{}');
INSERT INTO "events" VALUES(11,'over-dd89f4',1,'job_running',0,1763708414.0,'{}');
INSERT INTO "events" VALUES(12,'over-dd89f4',1,'checkpoint_saved',2,1763708414.5,'{}');
INSERT INTO "events" VALUES(13,'failed-5d6dc5',1,'job_running',0,1763708416.5,'{}');
INSERT INTO "events" VALUES(14,'failed-5d6dc5',1,'checkpoint_saved',2,1763708417.0,'{}');
INSERT INTO "events" VALUES(15,'over-dd89f4',1,'job_succeeded',3,1763708419.5,'{}');
INSERT INTO "events" VALUES(16,'failed-5d6dc5',1,'job_failed',3,1763708421.0,'{"reason": "the run ended without a reason; see its log: thinwire logs failed-5d6dc5"}');
CREATE TABLE jobs (
	id VARCHAR(80) NOT NULL, 
	name VARCHAR(63) NOT NULL, 
	spec JSON NOT NULL, 
	spec_digest VARCHAR(64) NOT NULL, 
	idempotency_key VARCHAR(255), 
	token_hash VARCHAR(64) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	reason VARCHAR, 
	attempt INTEGER NOT NULL, 
	max_attempts INTEGER NOT NULL, 
	created_at FLOAT NOT NULL, 
	started_at FLOAT, 
	finished_at FLOAT, 
	newest_sample JSON, 
	newest_validation JSON, 
	summary JSON, 
	failure JSON, 
	version INTEGER NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (idempotency_key), 
	UNIQUE (token_hash)
);
INSERT INTO "jobs" VALUES('running-5b2e91','running','{"name": "running", "seed": 0, "steps": 60, "global_batch": 8, "recipe": {"name": "gpt", "layers": 5, "width": 192, "heads": 6, "context": 128}, "data": {"source": "python-stdlib", "validation_fraction": 0.1}, "optimizer": {"name": "onebit_adam", "lr": 0.002, "betas": [0.9, 0.999], "eps": 1e-08, "weight_decay": 0.0, "warmup": 0.2}, "lr_schedule": {"warmup": 0.05, "decay": "cosine", "final_fraction": 0.1}, "workers": {"min": 2, "max": 2, "device": "auto", "max_restarts": 3}, "checkpoint": {"every_steps": 50, "keep": 2}, "evaluation": {"every_steps": 25, "windows": 64}}','488a9b4fa60d6004416d1df30ed68c5649a8b5d39367b26cb79b15a8650169e7','running','62dfd193c39bfd97e639785fdec2061063075b7e8d300ad7ef11b3e9c199b461','RUNNING',NULL,1,4,1763708401.5,1763708411.5,NULL,'{"attempt": 1, "sample": {"step": 3, "phase": "warmup", "loss": 5.2, "validation_loss": null, "lr": 0.001, "step_seconds": 0.1, "samples_per_second": 80.0, "payload_bytes": 1000, "payload_bytes_total": 3000, "compression_ratio": 2.0, "world_size": 2, "time": 1763708412.0}}',NULL,NULL,NULL,3);
INSERT INTO "jobs" VALUES('pending-7cf5a1','pending','{"name": "pending", "seed": 0, "steps": 60, "global_batch": 8, "recipe": {"name": "gpt", "layers": 5, "width": 192, "heads": 6, "context": 128}, "data": {"source": "python-stdlib", "validation_fraction": 0.1}, "optimizer": {"name": "onebit_adam", "lr": 0.002, "betas": [0.9, 0.999], "eps": 1e-08, "weight_decay": 0.0, "warmup": 0.2}, "lr_schedule": {"warmup": 0.05, "decay": "cosine", "final_fraction": 0.1}, "workers": {"min": 2, "max": 2, "device": "auto", "max_restarts": 3}, "checkpoint": {"every_steps": 50, "keep": 2}, "evaluation": {"every_steps": 25, "windows": 64}}','9176bfbbcbf68bc45b672655977ed6997a81f16233efdd175222456939f7d816','pending','1d9f047942266566916bccb3f9f8587c405ab7491d871526c95904becf56db9a','PENDING',NULL,1,4,1763708403.0,NULL,NULL,NULL,NULL,NULL,NULL,2);
INSERT INTO "jobs" VALUES('over-dd89f4','over','{"name": "over", "seed": 0, "steps": 60, "global_batch": 8, "recipe": {"name": "gpt", "layers": 5, "width": 192, "heads": 6, "context": 128}, "data": {"source": "python-stdlib", "validation_fraction": 0.1}, "optimizer": {"name": "onebit_adam", "lr": 0.002, "betas": [0.9, 0.999], "eps": 1e-08, "weight_decay": 0.0, "warmup": 0.2}, "lr_schedule": {"warmup": 0.05, "decay": "cosine", "final_fraction": 0.1}, "workers": {"min": 2, "max": 2, "device": "auto", "max_restarts": 3}, "checkpoint": {"every_steps": 50, "keep": 2}, "evaluation": {"every_steps": 25, "windows": 64}}','4fc155cfd4c9bdc4b51cd26923eef2adbef95267af5a53484ec590c7a5b7581f','over','5db665549071ac31efc4f800a6433e685c80b531fc2e718ad4b2391389b00372','SUCCEEDED',NULL,1,4,1763708405.0,1763708414.0,1763708419.5,'{"attempt": 1, "sample": {"step": 3, "phase": "warmup", "loss": 5.2, "validation_loss": null, "lr": 0.001, "step_seconds": 0.1, "samples_per_second": 80.0, "payload_bytes": 1000, "payload_bytes_total": 3000, "compression_ratio": 2.0, "world_size": 2, "time": 1763708414.5}}',NULL,NULL,NULL,4);
INSERT INTO "jobs" VALUES('failed-5d6dc5','failed','{"name": "failed", "seed": 0, "steps": 60, "global_batch": 8, "recipe": {"name": "gpt", "layers": 5, "width": 192, "heads": 6, "context": 128}, "data": {"source": "python-stdlib", "validation_fraction": 0.1}, "optimizer": {"name": "onebit_adam", "lr": 0.002, "betas": [0.9, 0.999], "eps": 1e-08, "weight_decay": 0.0, "warmup": 0.2}, "lr_schedule": {"warmup": 0.05, "decay": "cosine", "final_fraction": 0.1}, "workers": {"min": 2, "max": 2, "device": "auto", "max_restarts": 3}, "checkpoint": {"every_steps": 50, "keep": 2}, "evaluation": {"every_steps": 25, "windows": 64}}','3af13f3debda45513ef39defc3d9f1187fcb36be28e78706c001cfbcfcea0864','failed','597073a346e6e8f373b5cff1e95143f1f878c27af4ef84e5f767f36143c489cd','FAILED','the run ended without a reason; see its log: thinwire logs failed-5d6dc5',1,4,1763708406.5,1763708416.5,1763708421.0,'{"attempt": 1, "sample": {"step": 3, "phase": "warmup", "loss": 5.2, "validation_loss": null, "lr": 0.001, "step_seconds": 0.1, "samples_per_second": 80.0, "payload_bytes": 1000, "payload_bytes_total": 3000, "compression_ratio": 2.0, "world_size": 2, "time": 1763708417.0}}',NULL,NULL,NULL,4);
CREATE TABLE samples (
	job_id VARCHAR(80) NOT NULL, 
	step INTEGER NOT NULL, 
	attempt INTEGER NOT NULL, 
	sample JSON NOT NULL, 
	PRIMARY KEY (job_id, step), 
	FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
INSERT INTO "samples" VALUES('running-5b2e91',1,1,'{"step": 1, "phase": "warmup", "loss": 5.4, "validation_loss": null, "lr": 0.001, "step_seconds": 0.1, "samples_per_second": 80.0, "payload_bytes": 1000, "payload_bytes_total": 1000, "compression_ratio": 2.0, "world_size": 2, "time": 1763708412.0}');
INSERT INTO "samples" VALUES('running-5b2e91',2,1,'{"step": 2, "phase": "warmup", "loss": 5.3, "validation_loss": null, "lr": 0.001, "step_seconds": 0.1, "samples_per_second": 80.0, "payload_bytes": 1000, "payload_bytes_total": 2000, "compression_ratio": 2.0, "world_size": 2, "time": 1763708412.0}');
INSERT INTO "samples" VALUES('running-5b2e91',3,1,'{"step": 3, "phase": "warmup", "loss": 5.2, "validation_loss": null, "lr": 0.001, "step_seconds": 0.1, "samples_per_second": 80.0, "payload_bytes": 1000, "payload_bytes_total": 3000, "compression_ratio": 2.0, "world_size": 2, "time": 1763708412.0}');
INSERT INTO "samples" VALUES('over-dd89f4',1,1,'{"step": 1, "phase": "warmup", "loss": 5.4, "validation_loss": null, "lr": 0.001, "step_seconds": 0.1, "samples_per_second": 80.0, "payload_bytes": 1000, "payload_bytes_total": 1000, "compression_ratio": 2.0, "world_size": 2, "time": 1763708414.5}');
INSERT INTO "samples" VALUES('over-dd89f4',2,1,'{"step": 2, "phase": "warmup", "loss": 5.3, "validation_loss": null, "lr": 0.001, "step_seconds": 0.1, "samples_per_second": 80.0, "payload_bytes": 1000, "payload_bytes_total": 2000, "compression_ratio": 2.0, "world_size": 2, "time": 1763708414.5}');
INSERT INTO "samples" VALUES('over-dd89f4',3,1,'{"step": 3, "phase": "warmup", "loss": 5.2, "validation_loss": null, "lr": 0.001, "step_seconds": 0.1, "samples_per_second": 80.0, "payload_bytes": 1000, "payload_bytes_total": 3000, "compression_ratio": 2.0, "world_size": 2, "time": 1763708414.5}');
INSERT INTO "samples" VALUES('failed-5d6dc5',1,1,'{"step": 1, "phase": "warmup", "loss": 5.4, "validation_loss": null, "lr": 0.001, "step_seconds": 0.1, "samples_per_second": 80.0, "payload_bytes": 1000, "payload_bytes_total": 1000, "compression_ratio": 2.0, "world_size": 2, "time": 1763708417.0}');
INSERT INTO "samples" VALUES('failed-5d6dc5',2,1,'{"step": 2, "phase": "warmup", "loss": 5.3, "validation_loss": null, "lr": 0.001, "step_seconds": 0.1, "samples_per_second": 80.0, "payload_bytes": 1000, "payload_bytes_total": 2000, "compression_ratio": 2.0, "world_size": 2, "time": 1763708417.0}');
INSERT INTO "samples" VALUES('failed-5d6dc5',3,1,'{"step": 3, "phase": "warmup", "loss": 5.2, "validation_loss": null, "lr": 0.001, "step_seconds": 0.1, "samples_per_second": 80.0, "payload_bytes": 1000, "payload_bytes_total": 3000, "compression_ratio": 2.0, "world_size": 2, "time": 1763708417.0}');
CREATE TABLE worker_leases (
	job_id VARCHAR(80) NOT NULL, 
	rank INTEGER NOT NULL, 
	attempt INTEGER NOT NULL, 
	address VARCHAR(255) NOT NULL, 
	pid INTEGER NOT NULL, 
	node VARCHAR(255) NOT NULL, 
	expires_at FLOAT NOT NULL, 
	PRIMARY KEY (job_id, rank), 
	FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
CREATE INDEX ix_jobs_state ON jobs (state);
CREATE INDEX ix_jobs_created_at ON jobs (created_at);
CREATE INDEX events_of_job ON events (job_id, time);
CREATE INDEX ix_worker_leases_expires_at ON worker_leases (expires_at);
COMMIT;
