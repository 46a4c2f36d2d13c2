// probe prints what a process in a container can do, one fact per line, and then waits. Its arguments:
//   MAJOR:MINOR   makes a device node of that number and opens it
//   NAME.so.N     loads a library
//   NAME          prints a variable
//   once          ends instead of waiting
// First it opens every device node below /dev whose name begins with "nvidia", and lists the mounts that name devices.
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

// tryOpen prints the kernel's answer. A device controller that denies the number gives EPERM. No driver of this machine has
// the numbers of NVIDIA's devices, so that a controller that allows them lets the kernel answer ENXIO.
static void tryOpen(const char *kind, const char *path, int flags, dev_t number) {
  int fd = open(path, flags);
  printf("%s %s %u:%u %s\n", kind, path, major(number), minor(number), fd < 0 ? strerrorname_np(errno) : "opened");
  if (fd >= 0) close(fd);
}

static void openNodes(const char *folder) {
  DIR *dir = opendir(folder);
  for (struct dirent *entry; dir && (entry = readdir(dir));) {
    char path[1024];
    struct stat st;
    snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
    if (strncmp(entry->d_name, "nvidia", 6) || lstat(path, &st)) continue;
    if (S_ISDIR(st.st_mode)) openNodes(path);
    else if (!S_ISCHR(st.st_mode)) printf("node %s 0:0 none\n", path);
    // A capability of MIG may be read only.
    else tryOpen("node", path, strstr(path, "/nvidia-caps/") ? O_RDONLY : O_RDWR, st.st_rdev);
  }
  if (dir) closedir(dir);
}

static void listMounts(const char *folder) {
  DIR *dir = opendir(folder);
  for (struct dirent *entry; dir && (entry = readdir(dir));)
    if (entry->d_name[0] != '.') printf("mount %s\n", entry->d_name);
  if (dir) closedir(dir);
}

static void makeNode(unsigned int of, unsigned int number) {
  const char *path = "/tmp/made";
  if (mknod(path, S_IFCHR | 0666, makedev(of, number)))
    printf("made %s %u:%u mknod:%s\n", path, of, number, strerrorname_np(errno));
  else
    tryOpen("made", path, O_RDONLY, makedev(of, number));
  unlink(path);
}

int main(int count, char **arguments) {
  int once = 0;
  signal(SIGTERM, _exit); // as process 1 of a container it would get none
  openNodes("/dev");
  listMounts("/var/run/nvidia-container-devices");
  for (int i = 1; i < count; i++) {
    const char *word = arguments[i];
    unsigned int of, number;
    if (!strcmp(word, "once")) once = 1;
    else if (sscanf(word, "%u:%u", &of, &number) == 2) makeNode(of, number);
    else if (strstr(word, ".so")) printf("library %s %s\n", word, dlopen(word, RTLD_NOW) ? "loaded" : dlerror());
    else if (getenv(word)) printf("variable %s %s\n", word, getenv(word));
  }
  puts("end");
  fflush(stdout);
  while (!once) pause();
}
