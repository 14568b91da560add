package api

// The kinds of doctor bundles: what they are about.
const (
	DoctorInstallation = "installation"
	DoctorSandbox      = "sandbox"
	DoctorJob          = "job"
	DoctorWorkspace    = "workspace"
	DoctorSession      = "session"
)

// DoctorManifestName is the name of the first file of a doctor bundle, which
// contains its DoctorManifest.
const DoctorManifestName = "manifest.json"

// DoctorSchema is the version of the format of doctor bundles.
const DoctorSchema = 1

// DoctorManifest describes a doctor bundle. It contains no time of its
// creation: the same state gives the same bytes.
type DoctorManifest struct {
	Schema   int               `json:"schema"`
	Kind     string            `json:"kind"`
	Subject  string            `json:"subject,omitempty"` // VMID or ID; "" for the installation
	Versions map[string]string `json:"versions"`          // of the programs, by name
	Files    []DoctorFile      `json:"files"`             // all files except the manifest, in their order
	Errors   []DoctorError     `json:"errors"`            // files that are missing, and why
}

// DoctorFile is one file of a doctor bundle.
type DoctorFile struct {
	Name      string `json:"name"`
	Size      int64  `json:"size"` // bytes
	SHA256    string `json:"sha256"`
	Truncated string `json:"truncated,omitempty"` // what the file lacks; "" if it is complete
}

// DoctorError is the reason why a file is missing.
type DoctorError struct {
	Name    string `json:"name"` // of the file
	Code    string `json:"code"`
	Message string `json:"message"`
}
