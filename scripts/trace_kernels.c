// Records when kernels begin and end, those of CUDA graphs too, by CUPTI: a library that the driver loads into any program
// (CUDA_INJECTION64_PATH). At the end of the program the last records go to the file KERNEL_TRACE, a line each: begin and end in
// nanoseconds, blocks in x and y, name.
#include <cupti.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RECORDS (1u << 18)
#define BUFFER_BYTES (8u << 20)

struct record {
    uint64_t begin, end;
    int blocks_x, blocks_y;
    char name[64];
};

static struct record *records;
static uint64_t count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void check(CUptiResult result, const char *call) {
    if (result == CUPTI_SUCCESS) return;
    const char *message = "?";
    cuptiGetResultString(result, &message);
    fprintf(stderr, "trace_kernels: %s: %s\n", call, message);
    _Exit(1);
}

static void give_buffer(uint8_t **buffer, size_t *size, size_t *most_records) {
    *buffer = aligned_alloc(8, BUFFER_BYTES);
    *size = *buffer == NULL ? 0 : BUFFER_BYTES;
    *most_records = 0;
}

static void take_buffer(CUcontext context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid) {
    (void)context, (void)stream, (void)size;
    CUpti_Activity *activity = NULL;
    pthread_mutex_lock(&lock);
    while (cuptiActivityGetNextRecord(buffer, valid, &activity) == CUPTI_SUCCESS) {
        if (activity->kind != CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) continue;
        const CUpti_ActivityKernel10 *kernel = (const CUpti_ActivityKernel10 *)activity;
        struct record *record = &records[count++ % RECORDS];
        record->begin = kernel->start, record->end = kernel->end;
        record->blocks_x = kernel->gridX, record->blocks_y = kernel->gridY;
        snprintf(record->name, sizeof record->name, "%s", kernel->name);
    }
    pthread_mutex_unlock(&lock);
    free(buffer);
}

static void write_records(void) {
    check(cuptiActivityFlushAll(1), "cuptiActivityFlushAll");
    const char *path = getenv("KERNEL_TRACE");
    FILE *file = path == NULL ? NULL : fopen(path, "w");
    if (file == NULL) {
        perror("trace_kernels: KERNEL_TRACE");
        _Exit(1);
    }
    for (uint64_t i = count > RECORDS ? count - RECORDS : 0; i < count; ++i) {
        const struct record *record = &records[i % RECORDS];
        fprintf(file, "%llu %llu %d %d %s\n", (unsigned long long)record->begin, (unsigned long long)record->end, record->blocks_x,
                record->blocks_y, record->name);
    }
    fclose(file);
}

// What the driver calls.
int InitializeInjection(void) {
    records = calloc(RECORDS, sizeof *records);
    if (records == NULL) return 0;
    check(cuptiActivityRegisterCallbacks(give_buffer, take_buffer), "cuptiActivityRegisterCallbacks");
    check(cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL), "cuptiActivityEnable");
    atexit(write_records);
    return 1;
}
