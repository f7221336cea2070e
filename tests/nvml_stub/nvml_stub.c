/* A libnvidia-ml.so.1 that plays GPUs by a scenario, for tests without one. No code of NVIDIA's: the functions that
 * autotune calls, with the signatures and structures of the NVML API reference.
 *
 * NVML_STUB_SCENARIO names a file, read anew at each call, of lines "key word word ...". Where a key has several words,
 * the first question is answered by the first, the next by the next, and all later ones by the last; a key that is
 * asked of one device may have the device's number before it ("1.sm_clock"), one asked of the MIG device "mig". What
 * a scenario does not mention is answered NOT_SUPPORTED. See __init__.py for the keys.
 *
 * -DOLD_DRIVER leaves out what came with driver 510 and later.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>

enum { SUCCESS, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND = 6, LIBRARY_NOT_FOUND = 12, MISMATCH = 25 };

typedef unsigned long long u64;
typedef struct { int index, is_mig; } Device;
typedef struct { Device *device; int is_mig; } GpmSample;
typedef union { double d; unsigned int ui; unsigned long ul; u64 ull; } Value;
typedef struct { u64 time_us; Value value; } Sample;
typedef struct { u64 total, free, used; } Memory;
typedef struct { unsigned int version; u64 total, reserved, free, used; } MemoryV2;
typedef struct { unsigned int gpu, memory; } Utilization;
typedef struct { unsigned int version, sensor; int celsius; } Temperature;
typedef struct { unsigned int version, is_supported; } GpmSupport;
typedef struct { unsigned int id, result; double value; const char *names[3]; } GpmMetric;
typedef struct { unsigned int version, count; GpmSample *first, *second; GpmMetric metrics[]; } GpmMetrics;
typedef struct { unsigned int field, scope; long long time, latency; unsigned int type, result; Value value; } Field;

#define MOST 256
static Device gpus[16], mig = {0, 1};
static int references, live_samples;
static struct { char name[96]; int times; } asked[MOST];

/* How often something was asked for before. */
static int times_asked(const char *name, int step) {
    for (int i = 0; i < MOST; i++) {
        if (!asked[i].name[0]) snprintf(asked[i].name, sizeof asked[i].name, "%s", name);
        if (!strcmp(asked[i].name, name)) return (asked[i].times += step) - step;
    }
    return 0;
}

/* The n-th word of a line of the scenario, or the last before it. */
static int word_of(const char *key, int n, char *word, size_t size) {
    const char *path = getenv("NVML_STUB_SCENARIO");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[4096];
    int found = 0;
    while (file && fgets(line, sizeof line, file)) {
        char *rest = line, *next = strtok_r(line, " \n", &rest);
        if (!next || strcmp(next, key)) continue;
        for (int i = 0; i <= n && (next = strtok_r(NULL, " \n", &rest)); i++) found = snprintf(word, size, "%s", next) > 0;
    }
    if (file) fclose(file);
    return found;
}

static const char *prefixed(const Device *device, const char *key, char *name, size_t size) {
    if (device->is_mig) snprintf(name, size, "mig.%s", key);
    else snprintf(name, size, "%d.%s", device->index, key);
    return name;
}

/* What the scenario says of a device; a MIG device has no answers but its own. */
static int text(const Device *device, const char *key, char *word, size_t size) {
    char name[96];
    prefixed(device, key, name, sizeof name);
    int n = times_asked(name, 1);
    return word_of(name, n, word, size) || (!device->is_mig && word_of(key, n, word, size));
}

static int number(const Device *device, const char *key, u64 *value) {
    char word[64];
    if (!text(device, key, word, sizeof word)) return NOT_SUPPORTED;
    *value = strtoull(word, NULL, 0);
    return SUCCESS;
}

static int small(const Device *device, const char *key, unsigned int *value) {
    u64 wide;
    int result = number(device, key, &wide);
    if (result == SUCCESS) *value = (unsigned int)wide;
    return result;
}

/* "refuse.nvmlDeviceGetClockInfo 4" has a function answer with that error. */
static int refusal(const char *function) {
    char key[96], word[32];
    times_asked(function, 1);
    snprintf(key, sizeof key, "refuse.%s", function);
    if (word_of(key, times_asked(key, 1), word, sizeof word)) return atoi(word);
    return references > 0 ? SUCCESS : UNINITIALIZED;
}

#define ENTER(device) do { int refused = refusal(__func__); if (refused) return refused; if (!(device)) return INVALID_ARGUMENT; } while (0)

static int whole(const char *key) {
    char word[32];
    return word_of(key, 0, word, sizeof word) ? atoi(word) : 0;
}

/* For tests: calls of a function so far, samples of GPM that nobody has freed, references to the library. */
int nvmlStubCalls(const char *function) { return times_asked(function, 0); }
int nvmlStubLiveSamples(void) { return live_samples; }
int nvmlStubReferences(void) { return references; }
void nvmlStubReset(void) { memset(asked, 0, sizeof asked); references = live_samples = 0; }

int nvmlInitWithFlags(unsigned int flags) {
    int refused = refusal(__func__);
    (void)flags;
    if (refused && refused != UNINITIALIZED) return refused;
    references++;
    for (int i = 0; i < 16; i++) gpus[i].index = i;
    return SUCCESS;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlInit(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) {
    if (references == 0) return UNINITIALIZED;
    references--;
    return SUCCESS;
}
const char *nvmlErrorString(int result) { (void)result; return "refused by the scenario"; }

int nvmlSystemGetDriverVersion(char *version, unsigned int size) {
    ENTER(version);
    return word_of("driver", 0, version, size) ? SUCCESS : NOT_SUPPORTED;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    ENTER(version);
    *version = whole("cuda");
    return *version ? SUCCESS : LIBRARY_NOT_FOUND;
}

int nvmlDeviceGetCount_v2(unsigned int *count) {
    ENTER(count);
    *count = (unsigned int)whole("devices");
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, Device **device) {
    ENTER(device);
    if (index >= (unsigned int)whole("devices")) return INVALID_ARGUMENT;
    *device = &gpus[index];
    return SUCCESS;
}

int nvmlDeviceGetUUID(Device *device, char *uuid, unsigned int size) {
    ENTER(device);
    char name[96];
    return word_of(prefixed(device, "uuid", name, sizeof name), 0, uuid, size) ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetName(Device *device, char *product, unsigned int size) {
    ENTER(device);
    char key[96];
    return word_of(prefixed(device, "name", key, sizeof key), 0, product, size) ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Device **device) {
    ENTER(uuid);
    char name[96], own[96];
    if (word_of("mig.uuid", 0, own, sizeof own) && !strcmp(own, uuid)) return *device = &mig, SUCCESS;
    for (int i = 0; i < whole("devices"); i++) {
        if (!word_of(prefixed(&gpus[i], "uuid", name, sizeof name), 0, own, sizeof own) || strcmp(own, uuid)) continue;
        *device = &gpus[i];
        return SUCCESS;
    }
    return NOT_FOUND;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Device *device, Device **parent) {
    ENTER(device);
    if (!device->is_mig) return INVALID_ARGUMENT;
    *parent = &gpus[whole("mig.parent")];
    return SUCCESS;
}

int nvmlDeviceGetGpuInstanceId(Device *device, unsigned int *id) {
    ENTER(device);
    return device->is_mig ? small(device, "instance", id) : NOT_SUPPORTED;
}

/* "mig_mode 1": MIG has split the GPU. */
int nvmlDeviceGetMigMode(Device *device, unsigned int *current, unsigned int *pending) {
    ENTER(device && !device->is_mig);
    int result = small(device, "mig_mode", current);
    if (result == SUCCESS) *pending = *current;
    return result;
}

int nvmlDeviceGetMemoryInfo(Device *device, Memory *memory) {
    ENTER(device);
    u64 reserved = 0;
    int result = number(device, "memory_used", &memory->used);
    if (number(device, "memory_reserved", &reserved) == SUCCESS) memory->used += reserved;
    return result;
}

int nvmlDeviceGetUtilizationRates(Device *device, Utilization *rates) {
    ENTER(device);
    rates->memory = 0;
    return small(device, "busy", &rates->gpu);
}

/* Either "samples 100:20 300:40" (microseconds, per cent), or the clock's own: "samples_every_us 200000", "busy 70". */
int nvmlDeviceGetSamples(Device *device, int kind, u64 since, unsigned int *type, unsigned int *count, Sample *samples) {
    ENTER(device && kind == 1);
    char name[96], word[64];
    u64 every = 0, busy = 0;
    unsigned int found = 0, most = samples ? *count : 1000;
    if (device->is_mig || word_of("mig.uuid", 0, word, sizeof word)) return NOT_SUPPORTED;
    *type = 1;
    if (number(device, "samples_every_us", &every) == SUCCESS && number(device, "busy", &busy) == SUCCESS) {
        struct timeval now;
        gettimeofday(&now, NULL);
        u64 last = ((u64)now.tv_sec * 1000000 + (u64)now.tv_usec) / every;
        for (u64 one = last - 99; one <= last && found < most; one++) {
            if (one * every <= since) continue;
            if (samples) samples[found].time_us = one * every, samples[found].value.ull = 0, samples[found].value.ui = (unsigned int)busy;
            found++;
        }
    } else {
        prefixed(device, "samples", name, sizeof name);
        const char *key = word_of(name, 0, word, sizeof word) ? name : "samples";
        if (!word_of(key, 0, word, sizeof word)) return NOT_SUPPORTED;
        char before[64] = "";
        for (int i = 0; found < most && word_of(key, i, word, sizeof word) && strcmp(word, before); i++) {
            u64 time_us = strtoull(word, NULL, 10);
            snprintf(before, sizeof before, "%s", word);
            if (time_us <= since) continue;
            if (samples) samples[found].time_us = time_us, samples[found].value.ull = strtoull(strchr(word, ':') + 1, NULL, 10);
            found++;
        }
    }
    *count = found;
    return found ? SUCCESS : NOT_FOUND;
}

int nvmlDeviceGetClockInfo(Device *device, unsigned int kind, unsigned int *mhz) {
    ENTER(device);
    return small(device, kind == 1 ? "sm_clock" : kind == 2 ? "memory_clock" : "other_clock", mhz);
}

int nvmlDeviceGetMaxClockInfo(Device *device, unsigned int kind, unsigned int *mhz) {
    ENTER(device);
    return small(device, kind == 1 ? "max_sm_clock" : "other_clock", mhz);
}

int nvmlDeviceGetTemperature(Device *device, unsigned int sensor, unsigned int *celsius) {
    ENTER(device && sensor == 0);
    return small(device, "temperature", celsius);
}

int nvmlDeviceGetCurrentClocksThrottleReasons(Device *device, u64 *reasons) {
    ENTER(device);
    return number(device, "reasons", reasons);
}

int nvmlDeviceGetPowerUsage(Device *device, unsigned int *milliwatts) {
    ENTER(device);
    return small(device, "power_mw", milliwatts);
}

int nvmlDeviceGetTotalEnergyConsumption(Device *device, u64 *millijoules) {
    ENTER(device);
    return number(device, "energy_mj", millijoules);
}

int nvmlDeviceGetPersistenceMode(Device *device, unsigned int *mode) {
    ENTER(device);
    return small(device, "persistence", mode);
}

/* "field.74 0 500000000" */
int nvmlDeviceGetFieldValues(Device *device, int count, Field *fields) {
    ENTER(device);
    for (int i = 0; i < count; i++) {
        char key[32];
        snprintf(key, sizeof key, "field.%u", fields[i].field);
        fields[i].result = (unsigned int)number(device, key, &fields[i].value.ull);
        fields[i].type = 3;
    }
    return SUCCESS;
}

#ifndef OLD_DRIVER
int nvmlDeviceGetMemoryInfo_v2(Device *device, MemoryV2 *memory) {
    ENTER(device);
    if (memory->version != (sizeof *memory | 2u << 24)) return MISMATCH;
    return number(device, "memory_used", &memory->used);
}

int nvmlDeviceGetTemperatureV(Device *device, Temperature *temperature) {
    ENTER(device);
    if (temperature->version != (sizeof *temperature | 1u << 24)) return MISMATCH;
    return small(device, "temperature", (unsigned int *)&temperature->celsius);
}

int nvmlDeviceGetCurrentClocksEventReasons(Device *device, u64 *reasons) {
    ENTER(device);
    return number(device, "reasons", reasons);
}

int nvmlGpmQueryDeviceSupport(Device *device, GpmSupport *support) {
    ENTER(device);
    support->is_supported = (unsigned int)whole("gpm");
    return SUCCESS;
}

int nvmlGpmSampleAlloc(GpmSample **sample) {
    ENTER(sample);
    *sample = calloc(1, sizeof **sample);
    live_samples++;
    return SUCCESS;
}

int nvmlGpmSampleFree(GpmSample *sample) {
    ENTER(sample);
    free(sample);
    live_samples--;
    return SUCCESS;
}

int nvmlGpmSampleGet(Device *device, GpmSample *sample) {
    ENTER(device && sample);
    sample->device = device;
    return SUCCESS;
}

int nvmlGpmMigSampleGet(Device *device, unsigned int instance, GpmSample *sample) {
    ENTER(device && sample && !device->is_mig);
    if ((int)instance != whole("mig.instance")) return NOT_FOUND;
    sample->device = &mig;
    return SUCCESS;
}

/* "gpm.1 62.5", of the MIG device "mig.gpm.1 62.5": per cent between two samples. */
int nvmlGpmMetricsGet(GpmMetrics *asked_for) {
    ENTER(asked_for && asked_for->first && asked_for->second);
    if (asked_for->version != 1) return MISMATCH;
    for (unsigned int i = 0; i < asked_for->count; i++) {
        GpmMetric *metric = &asked_for->metrics[i];
        char key[32], word[64];
        snprintf(key, sizeof key, "gpm.%u", metric->id);
        metric->result = text(asked_for->second->device, key, word, sizeof word) ? SUCCESS : NOT_SUPPORTED;
        metric->value = metric->result == SUCCESS ? strtod(word, NULL) : 0.0;
    }
    return SUCCESS;
}
#endif
