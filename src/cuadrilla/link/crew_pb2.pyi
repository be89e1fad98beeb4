from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Nothing(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EnrolRequest(_message.Message):
    __slots__ = ("secret", "certificate_request", "numbered")
    SECRET_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    NUMBERED_FIELD_NUMBER: _ClassVar[int]
    secret: bytes
    certificate_request: bytes
    numbered: bool
    def __init__(self, secret: _Optional[bytes] = ..., certificate_request: _Optional[bytes] = ..., numbered: _Optional[bool] = ...) -> None: ...

class EnrolReply(_message.Message):
    __slots__ = ("certificate", "ca", "name")
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    CA_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    certificate: bytes
    ca: bytes
    name: str
    def __init__(self, certificate: _Optional[bytes] = ..., ca: _Optional[bytes] = ..., name: _Optional[str] = ...) -> None: ...

class Run(_message.Message):
    __slots__ = ("config", "files", "cuadrilla", "term", "takes_jobs", "run")
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    CUADRILLA_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    TAKES_JOBS_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    config: str
    files: _containers.RepeatedCompositeFieldContainer[File]
    cuadrilla: str
    term: int
    takes_jobs: bool
    run: str
    def __init__(self, config: _Optional[str] = ..., files: _Optional[_Iterable[_Union[File, _Mapping]]] = ..., cuadrilla: _Optional[str] = ..., term: _Optional[int] = ..., takes_jobs: _Optional[bool] = ..., run: _Optional[str] = ...) -> None: ...

class File(_message.Message):
    __slots__ = ("path", "sha256", "num_bytes")
    PATH_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    path: str
    sha256: bytes
    num_bytes: int
    def __init__(self, path: _Optional[str] = ..., sha256: _Optional[bytes] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "speed_hint", "environment")
    class EnvironmentEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SPEED_HINT_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    speed_hint: float
    environment: _containers.ScalarMap[str, str]
    def __init__(self, protocol: _Optional[int] = ..., speed_hint: _Optional[float] = ..., environment: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("micro_steps", "part")
    MICRO_STEPS_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    micro_steps: int
    part: float
    def __init__(self, micro_steps: _Optional[int] = ..., part: _Optional[float] = ...) -> None: ...

class Contribute(_message.Message):
    __slots__ = ("lease_id", "tokens", "loss_sum", "upload", "valid", "transfer_seconds")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOSS_SUM_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_FIELD_NUMBER: _ClassVar[int]
    VALID_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    tokens: int
    loss_sum: float
    upload: str
    valid: bool
    transfer_seconds: float
    def __init__(self, lease_id: _Optional[int] = ..., tokens: _Optional[int] = ..., loss_sum: _Optional[float] = ..., upload: _Optional[str] = ..., valid: _Optional[bool] = ..., transfer_seconds: _Optional[float] = ...) -> None: ...

class Computed(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    def __init__(self, lease_id: _Optional[int] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("usage", "phase", "waiting_part", "sent_bytes_per_second", "received_bytes_per_second", "round_trip_seconds", "lines", "dropped", "facts")
    class FactsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    USAGE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    WAITING_PART_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    usage: Usage
    phase: str
    waiting_part: float
    sent_bytes_per_second: float
    received_bytes_per_second: float
    round_trip_seconds: float
    lines: _containers.RepeatedCompositeFieldContainer[LogLine]
    dropped: int
    facts: _containers.ScalarMap[str, str]
    def __init__(self, usage: _Optional[_Union[Usage, _Mapping]] = ..., phase: _Optional[str] = ..., waiting_part: _Optional[float] = ..., sent_bytes_per_second: _Optional[float] = ..., received_bytes_per_second: _Optional[float] = ..., round_trip_seconds: _Optional[float] = ..., lines: _Optional[_Iterable[_Union[LogLine, _Mapping]]] = ..., dropped: _Optional[int] = ..., facts: _Optional[_Mapping[str, str]] = ...) -> None: ...

class LogLine(_message.Message):
    __slots__ = ("level", "text")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    level: str
    text: str
    def __init__(self, level: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("cpu_percent", "memory_used_bytes", "memory_bytes", "process_cpu_percent", "process_memory_bytes", "disk_free_bytes", "disk_bytes", "disk_read_bytes_per_second", "disk_written_bytes_per_second", "network_sent_bytes_per_second", "network_received_bytes_per_second", "temperature_celsius", "battery_percent", "on_battery", "gpus")
    CPU_PERCENT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROCESS_CPU_PERCENT_FIELD_NUMBER: _ClassVar[int]
    PROCESS_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_READ_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    DISK_WRITTEN_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    NETWORK_SENT_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    NETWORK_RECEIVED_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_CELSIUS_FIELD_NUMBER: _ClassVar[int]
    BATTERY_PERCENT_FIELD_NUMBER: _ClassVar[int]
    ON_BATTERY_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    cpu_percent: float
    memory_used_bytes: int
    memory_bytes: int
    process_cpu_percent: float
    process_memory_bytes: int
    disk_free_bytes: int
    disk_bytes: int
    disk_read_bytes_per_second: float
    disk_written_bytes_per_second: float
    network_sent_bytes_per_second: float
    network_received_bytes_per_second: float
    temperature_celsius: float
    battery_percent: float
    on_battery: bool
    gpus: _containers.RepeatedCompositeFieldContainer[Gpu]
    def __init__(self, cpu_percent: _Optional[float] = ..., memory_used_bytes: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., process_cpu_percent: _Optional[float] = ..., process_memory_bytes: _Optional[int] = ..., disk_free_bytes: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., disk_read_bytes_per_second: _Optional[float] = ..., disk_written_bytes_per_second: _Optional[float] = ..., network_sent_bytes_per_second: _Optional[float] = ..., network_received_bytes_per_second: _Optional[float] = ..., temperature_celsius: _Optional[float] = ..., battery_percent: _Optional[float] = ..., on_battery: _Optional[bool] = ..., gpus: _Optional[_Iterable[_Union[Gpu, _Mapping]]] = ...) -> None: ...

class Gpu(_message.Message):
    __slots__ = ("index", "name", "busy_percent", "memory_used_bytes", "memory_bytes", "temperature_celsius", "power_watts")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    BUSY_PERCENT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_CELSIUS_FIELD_NUMBER: _ClassVar[int]
    POWER_WATTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    name: str
    busy_percent: float
    memory_used_bytes: int
    memory_bytes: int
    temperature_celsius: float
    power_watts: float
    def __init__(self, index: _Optional[int] = ..., name: _Optional[str] = ..., busy_percent: _Optional[float] = ..., memory_used_bytes: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., temperature_celsius: _Optional[float] = ..., power_watts: _Optional[float] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("job", "config", "files", "begun", "call")
    JOB_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    job: str
    config: str
    files: _containers.RepeatedCompositeFieldContainer[File]
    begun: _containers.RepeatedCompositeFieldContainer[File]
    call: str
    def __init__(self, job: _Optional[str] = ..., config: _Optional[str] = ..., files: _Optional[_Iterable[_Union[File, _Mapping]]] = ..., begun: _Optional[_Iterable[_Union[File, _Mapping]]] = ..., call: _Optional[str] = ...) -> None: ...

class Recall(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class JobNews(_message.Message):
    __slots__ = ("job", "rows", "kept", "ended", "reason", "figures")
    JOB_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    job: str
    rows: _containers.RepeatedScalarFieldContainer[str]
    kept: int
    ended: str
    reason: str
    figures: str
    def __init__(self, job: _Optional[str] = ..., rows: _Optional[_Iterable[str]] = ..., kept: _Optional[int] = ..., ended: _Optional[str] = ..., reason: _Optional[str] = ..., figures: _Optional[str] = ...) -> None: ...

class ToCoordinator(_message.Message):
    __slots__ = ("hello", "progress", "contribute", "goodbye", "computed", "report", "job_news")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTE_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    JOB_NEWS_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    progress: Progress
    contribute: Contribute
    goodbye: Goodbye
    computed: Computed
    report: Report
    job_news: JobNews
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., contribute: _Optional[_Union[Contribute, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., computed: _Optional[_Union[Computed, _Mapping]] = ..., report: _Optional[_Union[Report, _Mapping]] = ..., job_news: _Optional[_Union[JobNews, _Mapping]] = ...) -> None: ...

class Version(_message.Message):
    __slots__ = ("version", "parameters", "standbys", "term")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    STANDBYS_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    version: int
    parameters: str
    standbys: _containers.RepeatedScalarFieldContainer[str]
    term: int
    def __init__(self, version: _Optional[int] = ..., parameters: _Optional[str] = ..., standbys: _Optional[_Iterable[str]] = ..., term: _Optional[int] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("lease_id", "version", "units", "planned_tokens")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    PLANNED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    version: int
    units: _containers.RepeatedScalarFieldContainer[int]
    planned_tokens: int
    def __init__(self, lease_id: _Optional[int] = ..., version: _Optional[int] = ..., units: _Optional[_Iterable[int]] = ..., planned_tokens: _Optional[int] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("reason", "refused", "again")
    REASON_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    reason: str
    refused: bool
    again: bool
    def __init__(self, reason: _Optional[str] = ..., refused: _Optional[bool] = ..., again: _Optional[bool] = ...) -> None: ...

class ToWorker(_message.Message):
    __slots__ = ("version", "lease", "stop", "assignment", "recall")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    RECALL_FIELD_NUMBER: _ClassVar[int]
    version: Version
    lease: Lease
    stop: Stop
    assignment: Assignment
    recall: Recall
    def __init__(self, version: _Optional[_Union[Version, _Mapping]] = ..., lease: _Optional[_Union[Lease, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., assignment: _Optional[_Union[Assignment, _Mapping]] = ..., recall: _Optional[_Union[Recall, _Mapping]] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("name", "dtype", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("name", "tensors", "num_bytes", "data", "crc")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CRC_FIELD_NUMBER: _ClassVar[int]
    name: str
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    num_bytes: int
    data: bytes
    crc: int
    def __init__(self, name: _Optional[str] = ..., tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., num_bytes: _Optional[int] = ..., data: _Optional[bytes] = ..., crc: _Optional[int] = ...) -> None: ...

class Uploaded(_message.Message):
    __slots__ = ("num_bytes",)
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    def __init__(self, num_bytes: _Optional[int] = ...) -> None: ...

class DownloadRequest(_message.Message):
    __slots__ = ("name", "offset")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    name: str
    offset: int
    def __init__(self, name: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class CheckReply(_message.Message):
    __slots__ = ("unix_seconds",)
    UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    unix_seconds: float
    def __init__(self, unix_seconds: _Optional[float] = ...) -> None: ...

class ReceiveRequest(_message.Message):
    __slots__ = ("seconds",)
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    def __init__(self, seconds: _Optional[float] = ...) -> None: ...

class RayNode(_message.Message):
    __slots__ = ("ray", "python", "port", "consents", "member")
    RAY_FIELD_NUMBER: _ClassVar[int]
    PYTHON_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    CONSENTS_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    ray: str
    python: str
    port: int
    consents: bool
    member: bytes
    def __init__(self, ray: _Optional[str] = ..., python: _Optional[str] = ..., port: _Optional[int] = ..., consents: _Optional[bool] = ..., member: _Optional[bytes] = ...) -> None: ...

class RayHead(_message.Message):
    __slots__ = ("address", "token", "refusal", "ask", "later")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    ASK_FIELD_NUMBER: _ClassVar[int]
    LATER_FIELD_NUMBER: _ClassVar[int]
    address: str
    token: str
    refusal: str
    ask: bool
    later: bool
    def __init__(self, address: _Optional[str] = ..., token: _Optional[str] = ..., refusal: _Optional[str] = ..., ask: _Optional[bool] = ..., later: _Optional[bool] = ...) -> None: ...

class CrewKeys(_message.Message):
    __slots__ = ("files",)
    class FilesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    FILES_FIELD_NUMBER: _ClassVar[int]
    files: _containers.ScalarMap[str, bytes]
    def __init__(self, files: _Optional[_Mapping[str, bytes]] = ...) -> None: ...

class Following(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class Grown(_message.Message):
    __slots__ = ("announced", "incarnation", "nodes", "files", "paused")
    ANNOUNCED_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    announced: int
    incarnation: int
    nodes: bytes
    files: _containers.RepeatedCompositeFieldContainer[GrownFile]
    paused: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, announced: _Optional[int] = ..., incarnation: _Optional[int] = ..., nodes: _Optional[bytes] = ..., files: _Optional[_Iterable[_Union[GrownFile, _Mapping]]] = ..., paused: _Optional[_Iterable[str]] = ...) -> None: ...

class GrownFile(_message.Message):
    __slots__ = ("path", "num_bytes")
    PATH_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    path: str
    num_bytes: int
    def __init__(self, path: _Optional[str] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class CopyRequest(_message.Message):
    __slots__ = ("path", "offset", "end")
    PATH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    path: str
    offset: int
    end: int
    def __init__(self, path: _Optional[str] = ..., offset: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...
