/* A stand-in for libnvidia-ml.so.1: the part of NVML's C interface that brim uses, answered from a state file.
 *
 * NVML_STATE names the file, which may be replaced at any time; one statement a line, a NAME runs to the line's end:
 *
 *   init CODE                                       what starting NVML answers
 *   gpu UUID TOTAL RESERVED FREE NAME               a GPU, amounts in bytes
 *   mig GPU_UUID UUID TOTAL RESERVED FREE NAME      a MIG device of a GPU, which makes it a GPU in MIG mode
 *   mig_mode GPU_UUID                               a GPU in MIG mode, whether or not it has MIG devices
 *   process UUID Compute|Graphics PID BYTES         a process on a device; BYTES -1 is N/A
 *   answer UUID|* FUNCTION CODE                     that function fails with CODE for that device (FUNCTION without
 *                                                   "nvmlDeviceGet", "*" for all)
 *   stride BYTES                                    size of a process entry in version 3 of the list (24, or 32 as in
 *                                                   drivers that changed it)
 *   xid GPU_UUID NUMBER                             an Xid event, delivered once
 *
 * Like NVML it belongs to the process that started it, a GPU found lost stays lost until NVML is started again, and
 * a handle is good only until then: using an older one, undefined in NVML, aborts here.
 * Built with -DWITHOUT_V3 it lacks version 3 of the process lists, with -DWITHOUT_MEMORY_V2 version 2 of the memory.
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
    TIMEOUT = 10, GPU_IS_LOST = 15, ARGUMENT_VERSION_MISMATCH = 25, MOST = 256
};

typedef unsigned long long bytes_t;
typedef struct { char uuid[96], name[96]; int parent, mig_mode; bytes_t total, reserved, available; } device_t;
typedef struct { char uuid[96], kind[16]; unsigned pid; bytes_t used; } process_t;
typedef struct { char uuid[96], function[64]; int code; } answer_t;
typedef struct { char uuid[96]; unsigned number; } xid_t;

/* NVML's own structures */
typedef struct { bytes_t total, available, used; } memory_t;
typedef struct { unsigned version; bytes_t total, reserved, available, used; } memory_v2_t;
typedef struct { unsigned pid; bytes_t used; unsigned instance, compute; } entry_t;
typedef struct { void *device; bytes_t type, data; unsigned instance, compute; } event_t;

static struct {
    int init, stride, devices, processes, answers, xids;
    device_t device[MOST];
    process_t process[MOST];
    answer_t answer[MOST];
    xid_t xid[MOST];
} state;

static pid_t owner;                              /* who started NVML; 0 nobody */
static int started, heard;                       /* how often it was started; Xid events delivered */
static char handles[MOST][96], lost[MOST][96];   /* a handle points at its device's UUID, for good */
static int handle_count, oldest_handle, lost_count;

static int find(const char *uuid) {
    for (int i = 0; i < state.devices; i++)
        if (!strcmp(state.device[i].uuid, uuid)) return i;
    return -1;
}

static void read_line(const char *line) {
    device_t device = {.parent = -1};
    process_t process;
    answer_t answer;
    xid_t xid;
    char gpu[96];
    long long used;
    if (sscanf(line, "gpu %95s %llu %llu %llu %95[^\n]", device.uuid, &device.total, &device.reserved,
               &device.available, device.name) == 5) {
        state.device[state.devices++] = device;
    } else if (sscanf(line, "mig %95s %95s %llu %llu %llu %95[^\n]", gpu, device.uuid, &device.total,
                      &device.reserved, &device.available, device.name) == 6) {
        device.parent = find(gpu);
        state.device[device.parent].mig_mode = 1;
        state.device[state.devices++] = device;
    } else if (sscanf(line, "mig_mode %95s", gpu) == 1) {
        state.device[find(gpu)].mig_mode = 1;
    } else if (sscanf(line, "process %95s %15s %u %lld", process.uuid, process.kind, &process.pid, &used) == 4) {
        process.used = (bytes_t)used;
        state.process[state.processes++] = process;
    } else if (sscanf(line, "answer %95s %63s %d", answer.uuid, answer.function, &answer.code) == 3) {
        state.answer[state.answers++] = answer;
    } else if (sscanf(line, "xid %95s %u", xid.uuid, &xid.number) == 2) {
        state.xid[state.xids++] = xid;
    } else if (sscanf(line, "init %d", &state.init) != 1 && sscanf(line, "stride %d", &state.stride) != 1) {
        fprintf(stderr, "stand-in: not understood: %s", line);
        abort();
    }
}

static void refresh(void) {
    static struct timespec changed;
    static ino_t inode;
    struct stat now;
    const char *path = getenv("NVML_STATE");
    if (!path || stat(path, &now)) { perror("stand-in: NVML_STATE"); abort(); }
    if (now.st_ino == inode && !memcmp(&now.st_mtim, &changed, sizeof changed)) return;
    inode = now.st_ino;
    changed = now.st_mtim;
    memset(&state, 0, sizeof state);
    state.stride = 24;
    char line[512];
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof line, file)) read_line(line);
    if (file) fclose(file);
}

static int ready(void) {
    refresh();
    return owner == getpid() ? SUCCESS : UNINITIALIZED;
}

/* What the state says that the function answers for the device. */
static int told(const char *uuid, const char *function) {
    for (int i = 0; i < lost_count; i++)
        if (!strcmp(lost[i], uuid)) return GPU_IS_LOST;
    for (int i = 0; i < state.answers; i++) {
        answer_t *answer = &state.answer[i];
        if (strcmp(answer->uuid, "*") && strcmp(answer->uuid, uuid)) continue;
        if (strcmp(answer->function, "*") && strcmp(answer->function, function)) continue;
        if (answer->code == GPU_IS_LOST && lost_count < MOST) strcpy(lost[lost_count++], uuid);
        return answer->code;
    }
    return SUCCESS;
}

static int reach(const char *handle, const char *function, device_t **device) {
    int code = ready();
    if (code) return code;
    if (handle < handles[oldest_handle]) { fprintf(stderr, "stand-in: stale handle of %s\n", handle); abort(); }
    if ((code = told(handle, function))) return code;
    int found = find(handle);
    if (found < 0) return INVALID_ARGUMENT;
    *device = &state.device[found];
    return SUCCESS;
}

static int give_handle(int index, const char *function, void **handle) {
    const char *uuid = state.device[index].uuid;
    int code = told(uuid, function), i = oldest_handle;
    if (code) return code;
    while (i < handle_count && strcmp(handles[i], uuid)) i++;
    if (i == handle_count) strcpy(handles[handle_count++], uuid);
    *handle = handles[i];
    return SUCCESS;
}

int nvmlInitWithFlags(unsigned flags) {
    refresh();
    if (state.init) return state.init;
    if (!state.devices && flags != 1) return NOT_FOUND;
    if (owner == getpid()) return started++, SUCCESS;
    owner = getpid();
    started = 1;
    oldest_handle = handle_count;
    lost_count = 0;
    return SUCCESS;
}

int nvmlShutdown(void) {
    if (ready()) return UNINITIALIZED;
    if (!--started) owner = 0;
    return SUCCESS;
}

const char *nvmlErrorString(int code) {
    static char text[32];
    snprintf(text, sizeof text, "stand-in error %d", code);
    return text;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    if (ready()) return UNINITIALIZED;
    *count = 0;
    for (int i = 0; i < state.devices; i++) *count += state.device[i].parent < 0;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    if (ready()) return UNINITIALIZED;
    for (int i = 0; i < state.devices; i++)
        if (state.device[i].parent < 0 && !index--) return give_handle(i, "HandleByIndex", handle);
    return INVALID_ARGUMENT;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    if (ready()) return UNINITIALIZED;
    int found = find(uuid);
    return found < 0 ? NOT_FOUND : give_handle(found, "HandleByUUID", handle);
}

int nvmlDeviceGetMigMode(const char *handle, unsigned *current, unsigned *pending) {
    device_t *device;
    int code = reach(handle, "MigMode", &device);
    if (!code) *current = *pending = device->mig_mode;
    return code;
}

int nvmlDeviceGetMaxMigDeviceCount(const char *handle, unsigned *count) {
    device_t *device;
    *count = 7;
    return reach(handle, "MaxMigDeviceCount", &device);
}

int nvmlDeviceGetMigDeviceHandleByIndex(const char *handle, unsigned index, void **part) {
    device_t *device;
    int code = reach(handle, "MigDeviceHandleByIndex", &device);
    for (int i = 0; !code && i < state.devices; i++)
        if (state.device[i].parent >= 0 && &state.device[state.device[i].parent] == device && !index--)
            return give_handle(i, "MigDeviceHandleByIndex", part);
    return code ? code : NOT_FOUND;
}

int nvmlDeviceGetUUID(const char *handle, char *uuid, unsigned length) {
    device_t *device;
    int code = reach(handle, "UUID", &device);
    if (!code) snprintf(uuid, length, "%s", device->uuid);
    return code;
}

int nvmlDeviceGetName(const char *handle, char *name, unsigned length) {
    device_t *device;
    int code = reach(handle, "Name", &device);
    if (!code) snprintf(name, length, "%s", device->name);
    return code;
}

int nvmlDeviceGetMemoryInfo(const char *handle, memory_t *memory) {
    device_t *device;
    int code = reach(handle, "MemoryInfo", &device);
    if (code) return code;
    memory->total = device->total;
    memory->available = device->available;
    memory->used = device->total - device->available;
    return SUCCESS;
}

#ifndef WITHOUT_MEMORY_V2
int nvmlDeviceGetMemoryInfo_v2(const char *handle, memory_v2_t *memory) {
    device_t *device;
    int code = reach(handle, "MemoryInfo_v2", &device);
    if (code) return code;
    if (memory->version != 0x02000028) return ARGUMENT_VERSION_MISMATCH;
    memory->total = device->total;
    memory->reserved = device->reserved;
    memory->available = device->available;
    memory->used = device->total - device->reserved - device->available;
    return SUCCESS;
}
#endif

static int list_processes(const char *handle, const char *function, const char *kind, int stride, unsigned *count,
                          char *entries) {
    device_t *device;
    int code = reach(handle, function, &device), found = 0;
    if (code) return code;
    for (int i = 0; i < state.processes; i++) {
        process_t *process = &state.process[i];
        if (strcmp(process->uuid, device->uuid) || strcmp(process->kind, kind)) continue;
        if (entries && found < (int)*count) {
            entry_t entry = {process->pid, process->used, ~0u, ~0u};
            memset(entries + found * stride, 0, stride);
            memcpy(entries + found * stride, &entry, sizeof entry);
        }
        found++;
    }
    int short_of_room = found > (int)*count;
    *count = found;
    return short_of_room ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v2(const char *handle, unsigned *count, char *entries) {
    return list_processes(handle, "ComputeRunningProcesses_v2", "Compute", 24, count, entries);
}

int nvmlDeviceGetGraphicsRunningProcesses_v2(const char *handle, unsigned *count, char *entries) {
    return list_processes(handle, "GraphicsRunningProcesses_v2", "Graphics", 24, count, entries);
}

#ifndef WITHOUT_V3
int nvmlDeviceGetComputeRunningProcesses_v3(const char *handle, unsigned *count, char *entries) {
    refresh();
    return list_processes(handle, "ComputeRunningProcesses", "Compute", state.stride, count, entries);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(const char *handle, unsigned *count, char *entries) {
    refresh();
    return list_processes(handle, "GraphicsRunningProcesses", "Graphics", state.stride, count, entries);
}
#endif

int nvmlEventSetCreate(void **set) {
    if (ready()) return UNINITIALIZED;
    heard = state.xids;
    *set = &heard;
    return told("*", "EventSetCreate");
}

int nvmlEventSetFree(void *set) {
    (void)set;
    return SUCCESS;
}

int nvmlDeviceRegisterEvents(const char *handle, bytes_t types, void *set) {
    device_t *device;
    (void)types;
    return set ? reach(handle, "RegisterEvents", &device) : INVALID_ARGUMENT;
}

int nvmlEventSetWait_v2(void *set, event_t *event, unsigned timeout_ms) {
    (void)set, (void)timeout_ms;
    if (ready()) return UNINITIALIZED;
    if (heard >= state.xids) return TIMEOUT;
    xid_t *xid = &state.xid[heard++];
    event->type = 8;
    event->data = xid->number;
    return give_handle(find(xid->uuid), "EventSetWait", &event->device);
}
